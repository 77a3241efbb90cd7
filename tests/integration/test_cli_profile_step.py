"""``floodplain profile step`` as a command: a real engine's steps, what is written, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from floodplain.cli.main import main
from floodplain.cost.step_time import PARTS, StepWork, read_cost
from floodplain.files.profile import Profile, read_profile
from floodplain.observe.profile import draw_profile
from floodplain.observe.strict_json import save_result
from tests.support.refusals import Refuse

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


def test_too_few_steps_are_refused_in_one_line(tmp_path: Path, refuse: Refuse) -> None:
    out = tmp_path / "step.json"
    told = refuse("profile", "step", MODEL, *ENGINE, "--shapes", "4", "--out", str(out), "-q")
    assert "4 steps are too few for 8 parameters: measure at least 16" in told
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [(["--shapes", "0"], "--shapes"), (["--repeats", "0"], "--repeats"), (["--step-seconds", "0"], "--step-seconds")],
)
def test_flags_out_of_their_range_are_refused(flags: list[str], complaint: str, tmp_path: Path, refuse: Refuse) -> None:
    assert complaint in refuse("profile", "step", MODEL, *flags, "--out", str(tmp_path / "step.json"), "-q")


# -- ``floodplain profile swap`` as a command, on a tiny model in virtual time -----------------------------------------


LOAD = ("--max-input", "60", "--max-output", "40", "--burst-seconds", "3", "--tries", "1")
LINE = ("--step-line", "0.01", "0.001", "0.0002")
POOL = ("--kv-memory", "128KiB", "--max-model-len", "200")


def swap(tmp_path: Path, *argv: str) -> Profile:
    """The profile that a command writes."""
    out = tmp_path / "swap.json"
    assert main(["profile", "swap", MODEL, *POOL, *LOAD, *argv, "--out", str(out), "-q"]) == 0
    return read_profile(out, "swap")


def test_bursts_need_swap_space_and_no_burst_needs_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Negative control: at a rate at which requests do not overlap, nothing is swapped out."""
    busy = swap(tmp_path, *LINE, "--request-rate", "8", "--policy", "cfs")
    assert 0 < busy.result["bursts"]["2x_bytes"] < busy.result["bursts"]["5x_bytes"]
    assert busy.result["needs_bytes"] == busy.result["bursts"]["3x_bytes"]
    assert all(row["needs_bytes"] >= row["swapped_bytes"] > 0 for row in busy.tries)
    assert busy.spare_bytes == -busy.result["needs_bytes"]
    assert "bursts.5x_bytes" in capsys.readouterr().out
    assert draw_profile(busy) is not None
    calm = swap(tmp_path, *LINE, "--request-rate", "0.1", "--bursts", "1", "--burst", "1", "--policy", "cfs")
    assert [row["swapped_bytes"] for row in calm.tries] == [0]


def test_the_rate_of_an_llm_profile_is_the_stable_rate(tmp_path: Path) -> None:
    result = {"rate_rps": 6.0, "peak_kv_bytes": 1, "kv_bytes": 2, "free_bytes": 1, "role": "consumer"}
    profile = Profile(kind="llm", subject=MODEL, machine="m", settings={}, result=result)
    save_result(tmp_path / "llm.json", profile.to_json())
    line = {"base_s": 0.01, "decode_s": 0.001, "prefill_token_s": 0.0002}
    steps = Profile(kind="step", subject=MODEL, machine="a clock", settings={}, result=line)
    save_result(tmp_path / "step.json", steps.to_json())
    bursts = ("--bursts", "2", "--burst", "2")
    found = swap(tmp_path, "--steps", str(tmp_path / "step.json"), "--llm-profile", str(tmp_path / "llm.json"), *bursts)
    assert (found.result["stable_rate_rps"], found.machine) == (6.0, "a clock")
    assert (
        found.tries == swap(tmp_path, *LINE, "--request-rate", "6", *bursts).tries
    )  # the same seeds give the same figures


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (LINE, "what is the stable rate? Give --request-rate, or --llm-profile"),
        ((*LINE, "--request-rate", "1", "--llm-profile", "x.json"), "what is the stable rate?"),
        ((*LINE, "--request-rate", "1", "--num-prompts", "9"), "--num-prompts does not go with --bursts"),
        ((*LINE, "--request-rate", "1", "--swap", "none"), "--swap none has no swap space to profile"),
        ((*LINE, "--request-rate", "1", "--device", "cuda"), "--device: nothing computes in virtual time"),
        (("--steps", "/nowhere.json", "--request-rate", "1"), "/nowhere.json"),
    ],
)
def test_what_contradicts_itself_is_refused(argv: tuple[str, ...], complaint: str, refuse: Refuse) -> None:
    assert complaint in refuse("profile", "swap", MODEL, *POOL, *argv, "-q")
