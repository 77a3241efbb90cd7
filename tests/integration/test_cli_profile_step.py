"""``floodplain profile step`` as a command: a real engine's steps, what is written, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from floodplain.cli.main import main
from floodplain.cost.step_time import PARTS, StepWork, read_cost
from floodplain.files.profile import read_profile

MODEL = "dummy:tiny-llama"
ENGINE = ["--kv-memory=8MiB", "--max-batched-tokens=128", "--max-num-seqs=8", "--dtype=float32", "--swap=none"]


def test_steps_of_an_engine_are_measured_fitted_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "step.json"
    grid = ["--shapes", "24", "--repeats", "2", "--step-seconds", "600"]  # enough on a busy machine
    assert main(["profile", "step", MODEL, *ENGINE, *grid, "--out", str(out), "-q"]) == 0
    profile = read_profile(out, "step")
    cost = read_cost(profile.result)
    assert set(profile.result["parts"]) == set(PARTS)
    assert not profile.is_virtual
    assert len(profile.tries) == 24
    for row in profile.tries:
        work = StepWork(**{name: row[name] for name in StepWork.__dataclass_fields__})
        assert row["fitted_s"] == pytest.approx(cost.time_s(work))
        assert row["step_s"] > 0
        assert row["times"] == 2
    assert 0 < profile.errors["median"] <= profile.errors["p95"] < math.inf
    printed = capsys.readouterr().out
    assert "parts.prefix_pair_s" in printed
    assert main(["profile", "show", str(out)]) == 0
    assert capsys.readouterr().out == printed


def test_too_few_steps_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "step.json"
    assert main(["profile", "step", MODEL, *ENGINE, "--shapes", "4", "--out", str(out), "-q"]) == 2
    assert "4 steps are too few for 8 parameters: measure at least 16" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [(["--shapes", "0"], "--shapes"), (["--repeats", "0"], "--repeats"), (["--step-seconds", "0"], "--step-seconds")],
)
def test_flags_out_of_their_range_are_refused(
    flags: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "step", MODEL, *flags, "--out", str(tmp_path / "step.json")]) == 2
    assert complaint in capsys.readouterr().err
