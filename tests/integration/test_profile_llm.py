"""``floodplain profile llm`` against an engine in this process, servers, and in virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from floodplain.cli.main import main
from floodplain.engine.outputs import EngineStats
from floodplain.files.profile import Profile, read_profile
from floodplain.observe.strict_json import save_result
from tests.fakes.engine import FakeEngine, serving
from tests.support.refusals import Refuse
from tests.support.vllm_like import NUM_BLOCKS, vllm_like

MODEL = "dummy:tiny-llama"
BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 2
"""16 tokens, K and V, 2 layers, 2 heads of 16 numbers, 2 bytes."""
SHORT = ("--max-input", "60", "--max-output", "20", "--ignore-eos")
LOOSE = ("--ttft-ms", "60000", "--itl-ms", "60000")
QUICK = ("--rates", "20", "40", "--rate-step", "20", "--try-seconds", "0.3", "--tries", "2", "--confidence", "0.5")


def profile(tmp_path: Path, *argv: str) -> Profile:
    """The profile that a command writes."""
    out = tmp_path / "profile.json"
    assert main(["profile", "llm", *argv, "--out", str(out), "-q"]) == 0
    return read_profile(out, "llm")


def engine(*argv: str) -> tuple[str, ...]:
    return (MODEL, "--kv-memory", "1MiB", "--max-model-len", "256", *SHORT, *QUICK, *argv)


# -- an engine in this process -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_engine_that_meets_all_goals_spares_the_rest_of_its_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = profile(tmp_path, *engine(*LOOSE, "--threshold", "1KiB"))
    result = found.result
    assert (result["rate_rps"], result["ended_by"], result["role"]) == (40.0, "range", "producer")
    assert result["kv_bytes"] == 2**20
    assert 0 < result["peak_kv_bytes"] < 2**20
    assert result["peak_kv_bytes"] % BLOCK_BYTES == 0
    assert result["free_bytes"] == result["kv_bytes"] - result["peak_kv_bytes"] == found.spare_bytes
    assert result["peak_kv_bytes"] == max(row["peak_kv_bytes"] for row in found.tries if row["rate_rps"] == 40.0)
    assert {(row["verdict"], row["cut"], row["failed"]) for row in found.tries} == {("met", False, 0)}
    assert len({row["seed"] for row in found.tries}) == len(found.tries)
    assert found.errors["is_sure"] and found.errors["undecided_rps"] == []
    assert not found.is_virtual
    assert "producer" in capsys.readouterr().out


@pytest.mark.slow
def test_an_engine_that_meets_no_goals_is_a_consumer_whose_tries_are_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.json"
    status = main(["profile", "llm", *engine("--ttft-ms", "0.001", "--threshold", "1KiB"), "--out", str(out)])
    assert status == 0
    found = read_profile(out)
    assert (found.result["rate_rps"], found.result["ended_by"]) == (0.0, "no_rate")
    assert (found.result["role"], found.result["free_bytes"], found.spare_bytes) == ("consumer", 0, 0)
    assert {row["verdict"] for row in found.tries} == {"missed"}
    assert "not even 20 requests/s meets the goals" in capsys.readouterr().err


@pytest.mark.slow
def test_refused_requests_miss_their_goals_and_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("prompt_tokens,output_tokens\n20,4\n20,4\n20,4\n400,4\n")
    argv = (MODEL, "--kv-memory", "1MiB", "--max-model-len", "256", "--lengths", str(lengths), *QUICK)
    assert main(["profile", "llm", *argv, "--goodput", "e2el:60000", "--format", "json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["result"]["rate_rps"] == 0.0
    assert "requests failed, the first with:" in told.err


# -- servers -----------------------------------------------------------------------------------------------------------


def served(url: str, *argv: str) -> tuple[str, ...]:
    return ("fake", "--base-url", url, "--tokenizer", MODEL, *SHORT, *LOOSE, *QUICK, *argv)


@pytest.mark.slow
def test_vllms_metrics_are_weighed_by_the_shape_of_the_model(tmp_path: Path) -> None:
    with vllm_like() as server:
        found = profile(tmp_path, *served(server.url))
        assert found.result["kv_bytes"] == NUM_BLOCKS * BLOCK_BYTES
        assert 0 < found.result["peak_kv_bytes"] <= server.most_held * BLOCK_BYTES
        assert found.result["rate_rps"] == 40.0
        assert found.machine == server.url
        weighed = profile(tmp_path, *served(f"{server.url}/v1", "--kv-block-bytes", "100"))
        assert weighed.result["kv_bytes"] == NUM_BLOCKS * 100


class IdleEngine(FakeEngine):
    """Reports one block for each live request, and none between tries."""

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._live),
            kv_blocks={"free": 20 - len(self._live), "owned": len(self._live)},
            kv_bytes={"local": 20_000},
        )


@pytest.mark.slow
def test_our_server_is_profiled_over_http(tmp_path: Path) -> None:
    with serving(IdleEngine()) as server:
        found = profile(tmp_path, *served(server.url))
    assert (found.result["rate_rps"], found.result["kv_bytes"]) == (40.0, 20_000)
    assert found.result["role"] == "consumer"  # it spares less than 10 GB


def test_a_server_without_metrics_of_its_kv_is_refused(refuse: Refuse) -> None:
    class Silent(FakeEngine):
        def stats(self) -> EngineStats:
            return EngineStats()

    with serving(Silent()) as server:
        told = refuse("profile", "llm", *served(server.url), "-q")
    assert told.startswith(f"{server.url}: its /metrics have neither floodplain_kv_blocks nor vllm:")


def test_an_address_without_a_server_is_refused(refuse: Refuse) -> None:
    with serving(FakeEngine()) as server:
        url = server.url
    told = refuse("profile", "llm", *served(url), "-q")
    assert told.startswith(f"no server at {url}: Connection refused")


# -- virtual time ------------------------------------------------------------------------------------------------------


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    path = tmp_path / "steps.json"
    result = {"base_s": 0.01, "decode_s": 0.001, "prefill_token_s": 0.001}
    measured = Profile(kind="step", subject=MODEL, machine="a laptop", settings={}, result=result)
    save_result(path, measured.to_json())
    return path


def virtual(steps: Path, *argv: str) -> tuple[str, ...]:
    load = ("--max-input", "100", "--max-output", "20", "--try-seconds", "4", "--itl-ms", "300")
    return (MODEL, "--steps", str(steps), "--kv-memory", "4MiB", *load, "--rates", "4", "32", "--rate-step", "4", *argv)


def without_times(found: Profile) -> dict[str, Any]:
    return {key: value for key, value in found.to_json().items() if key != "made_at"}


@pytest.mark.slow
def test_in_virtual_time_a_seed_decides_everything(tmp_path: Path, steps: Path) -> None:
    found = [profile(tmp_path, *virtual(steps, "--seed", seed)) for seed in ("1", "1", "2")]
    assert without_times(found[0]) == without_times(found[1])
    assert found[0].tries != found[2].tries
    assert found[0].is_virtual and found[0].machine == "a laptop"
    assert found[0].result["ended_by"] == "goals" and 4 <= found[0].result["rate_rps"] < 32


@pytest.mark.slow
def test_slower_steps_sustain_a_lower_rate(tmp_path: Path, steps: Path) -> None:
    fast = profile(tmp_path, *virtual(steps))
    document = json.loads(steps.read_text())
    document["result"] |= {"base_s": 0.04, "prefill_token_s": 0.003}
    steps.write_text(json.dumps(document))
    slow = profile(tmp_path, *virtual(steps))
    assert slow.result["rate_rps"] < fast.result["rate_rps"]


# -- flags -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--rates", "1"], "--rates takes the lowest and the highest rate, not 1 numbers"),
        (["--rates", "3", "1"], "rates must be above 0 and ascend, not 3 1"),
        (["--rate-step", "0"], "a step of 0 between rates gives no grid"),
        (["--tries", "0"], "a rate is tried 1 to 100 times, not 0"),
        (["--confidence", "1"], "--confidence must lie between 0 and 1, not 1"),
        (["--try-seconds", "0"], "--try-seconds must be above 0"),
        (["--share", "2"], "the share of requests within the goals"),
        (["--ttft-ms", "0"], "--ttft-ms must be above 0, not 0"),
        (["--goodput", "itl:5"], "goodput must read like"),
        (["--goodput", "tpot:5", "--itl-ms", "50"], "--goodput names all goals itself"),
        (["--base-url", "http://x", "--steps", "s.json"], "--base-url measures a server and --steps computes"),
        (["--tokenizer", "smollm2"], "--tokenizer is of a server: give its address with --base-url"),
        (["--kv-block-bytes", "1MiB"], "--kv-block-bytes is of a server"),
        (["--base-url", "http://x", "--kv-memory", "1GiB"], "--kv-memory: a server has its own"),
        (["--steps", "s.json"], "--steps needs --kv-memory"),
        (
            ["--steps", "s.json", "--kv-memory", "1GiB", "--device", "cuda"],
            "--device: nothing computes in virtual time",
        ),
        (["--coordinator", "http://127.0.0.1:1"], "--coordinator: an engine is profiled alone"),
        (["--request-rate", "2"], "--request-rate does not go with a search for the rate: give --rates"),
        (["--num-prompts", "2"], "--num-prompts does not go with"),
        (["--limit", "2"], "--limit does not go with"),
        (["--burst-factor", "2", "--request-rate", "1"], "does not go with a search"),
        (["--steps", "/nowhere/s.json", "--kv-memory", "1GiB"], "/nowhere/s.json"),
        (["--steps", "/nowhere/s.json", "--kv-memory", "900TiB"], "cannot read /nowhere/s.json"),
        (["--steps", "/nowhere/s.json", "--kv-memory", "1"], "--kv-memory 1B is less than one KV block"),
        (["--base-url", "ftp://x", "--tokenizer", MODEL], "--base-url must look like"),
    ],
)
def test_flags_that_contradict_each_other_are_refused_in_one_line(
    argv: list[str], complaint: str, refuse: Refuse
) -> None:
    assert complaint in refuse("profile", "llm", MODEL, *argv, "-q")
