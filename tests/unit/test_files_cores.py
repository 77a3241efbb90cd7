"""The cores of a process: its affinity, and the CPU quota of its container."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from floodplain.engine import compute_threads
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.stage_build import build_stage
from floodplain.files.control_groups import ControlGroups
from floodplain.files.cores import Cores, count_cores, find_cores

MODEL = EngineConfig(model="dummy:tiny-llama", kv_memory=2**20)


@pytest.fixture
def groups(tmp_path: Path) -> ControlGroups:
    (tmp_path / "own").write_text("0::/docker/a\n")
    return ControlGroups(tmp_path / "own", tmp_path / "groups")


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("limit", "quota"),
    [("200000 100000", 2.0), ("150000 100000", 1.5), ("max 100000", None), ("", None), ("0 0", None)],
)
def test_the_quota_of_a_container_is_read(limit: str, quota: float | None, groups: ControlGroups) -> None:
    write(groups.root / "docker" / "a", cpu__max=limit)
    assert find_cores(groups).quota == quota


def test_the_smallest_quota_above_a_process_counts(groups: ControlGroups) -> None:
    write(groups.root / "docker" / "a", cpu__max="400000 100000")
    write(groups.root / "docker", cpu__max="max 100000")
    write(groups.root, cpu__max="300000 100000")
    assert find_cores(groups).quota == 3.0


@pytest.mark.parametrize(("quota", "expected"), [("250000", 2.5), ("-1", None)])
def test_the_first_version_of_control_groups_is_read(quota: str, expected: float | None, groups: ControlGroups) -> None:
    groups.own.write_text("5:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n0::/docker/a\n")
    write(groups.root / "cpu", cpu__cfs_quota_us=quota, cpu__cfs_period_us="100000")
    assert find_cores(groups).quota == expected


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert find_cores(ControlGroups(tmp_path / "own", tmp_path)).quota is None


@given(st.integers(1, 64), st.none() | st.floats(0.01, 200))
def test_usable_cores_cover_the_quota_within_the_affinity(num_allowed: int, quota: float | None) -> None:
    found = Cores(64, num_allowed, quota).num_usable
    assert 1 <= found <= num_allowed
    assert found == num_allowed or (quota is not None and quota <= found < quota + 1)


def test_the_affinity_limits_the_cores() -> None:
    script = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
    script += "from floodplain.files.cores import find_cores; print(find_cores().num_allowed)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n" and 1 <= count_cores() <= len(os.sched_getaffinity(0))


def test_the_words_name_each_limit() -> None:
    assert str(Cores(64, 64, None)) == "64: the machine has 64"
    assert str(Cores(64, 8, 1.5)) == "2: the machine has 64, the affinity allows 8, the container's CPU quota is 1.5"


@pytest.mark.parametrize("variable", [None, "3"])
@pytest.mark.parametrize("part", ["engine", "stage"])
def test_compute_has_as_many_threads_as_cores(part: str, variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(compute_threads, "count_cores", lambda: 2)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        opened = build_engine(MODEL) if part == "engine" else build_stage(MODEL, 0, 2)
        opened.close()
        assert torch.get_num_threads() == (2 if variable is None else 3)
    finally:
        torch.set_num_threads(before)
