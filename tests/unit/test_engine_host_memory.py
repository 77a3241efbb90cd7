"""Available host memory: the machine's own count, and every cgroup limit above the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from floodplain.memory import host_memory
from floodplain.memory.host_memory import available_bytes

KIB = 1024


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 1000 KiB available, and no limits."""
    (tmp_path / "meminfo").write_text("MemTotal:  4000 kB\nMemFree: 10 kB\nMemAvailable:  1000 kB\n")
    (tmp_path / "own").write_text("")
    (tmp_path / "groups").mkdir()
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path / "groups")
    return tmp_path


def limit(folder: Path, most: str, used: int, cached: int, names: tuple[str, str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{most}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cached}\n")


def test_without_a_limit_it_is_what_the_machine_has(host: Path) -> None:
    assert available_bytes() == 1000 * KIB
    (host / "own").unlink()
    assert available_bytes() == 1000 * KIB


@pytest.mark.parametrize(
    ("names", "own", "base"),
    [
        (host_memory._V2, "0::/docker/a\n", ""),
        (host_memory._V1, "5:cpu:/docker/a\n4:hugetlb,memory:/docker/a\n", "memory"),
    ],
)
def test_a_container_has_what_its_limit_leaves_and_its_cache_can_free(
    names: tuple[str, str, str], own: str, base: str, host: Path
) -> None:
    (host / "own").write_text(own)
    limit(host / "groups" / base / "docker" / "a", "600000", 300_000, 50_000, names)
    assert available_bytes() == 350_000


@pytest.mark.parametrize("above", ["docker", ""])
def test_a_limit_further_up_counts_too(above: str, host: Path) -> None:
    (host / "own").write_text("0::/docker/a\n")
    limit(host / "groups" / "docker" / "a", "max", 300_000, 0, host_memory._V2)
    limit(host / "groups" / above, "500000", 400_000, 0, host_memory._V2)
    assert available_bytes() == 100_000


def test_where_more_is_used_than_is_allowed_nothing_is_left(host: Path) -> None:
    (host / "own").write_text("0::/\n")
    limit(host / "groups", "500000", 600_000, 0, host_memory._V2)
    assert available_bytes() == 0


def test_a_folder_that_the_container_does_not_see_limits_nothing(host: Path) -> None:
    """In a cgroup namespace, the path may lead out of the mounted tree."""
    (host / "own").write_text("0::/../../elsewhere\n")
    assert available_bytes() == 1000 * KIB


def test_a_limit_beyond_the_machine_limits_nothing(host: Path) -> None:
    (host / "own").write_text("0::/a\n")
    limit(host / "groups" / "a", str(2**62), 0, 0, host_memory._V2)
    assert available_bytes() == 1000 * KIB
