"""Both bench verbs from the command line to their result, over a tiny random model and over a fake server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from floodplain.cli.main import main
from tests.fakes.engine import FakeEngine, serving

MODEL = "dummy:tiny-llama"


def bench(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[dict[str, Any], str]:
    """(the result that a bench verb printed, its standard error)."""
    status = main(["bench", *argv, "--format", "json", "-q"])
    told = capsys.readouterr()
    assert status == 0, told.err
    return json.loads(told.out), told.err


def offline(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[dict[str, Any], str]:
    return bench(capsys, "offline", MODEL, "--kv-memory", "1MiB", "--max-model-len", "256", *argv)


def serve(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[dict[str, Any], str]:
    with serving(FakeEngine()) as server:
        return bench(capsys, "serve", "--base-url", server.url, "--model", "fake", "--tokenizer", MODEL, *argv)


@pytest.mark.parametrize("verb", [offline, serve])
def test_skipped_rows_are_reported_with_a_trace_and_unknown_without(
    verb: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("t_s,prompt_tokens,output_tokens\n0,5,3\n0,0,3\n0.01,6,2\n")
    result, told = verb(capsys, "--trace", str(path), "--ignore-eos")
    assert (result["completed"], result["total_output_tokens"]) == (2, 5)
    assert result["floodplain"]["skipped_rows"] == 1
    assert told.count("1 of 3 rows") == 1
    result, told = verb(capsys, "--num-prompts", "2", "--max-input", "9", "--max-output", "3")
    assert result["floodplain"]["skipped_rows"] is None
    assert "rows" not in told


@pytest.mark.parametrize("verb", [offline, serve])
def test_goals_are_measured_before_the_load_unless_given(verb: Any, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num-prompts", "3", "--max-input", "9", "--max-output", "3", "--ignore-eos")
    measured, _ = verb(capsys, *flags)
    assert (measured["completed"], len(measured["request_ids"])) == (3, 3)
    assert list(measured["floodplain"]["goals_ms"]) == ["ttft", "tpot"]
    assert 0 <= measured["slo_attainment"] <= 1
    asked, _ = verb(capsys, *flags, "--goodput", "ttft:1e6", "tpot:1e6")
    assert asked["floodplain"]["goals_ms"] == {"ttft": 1e6, "tpot": 1e6}
    assert (asked["slo_attainment"], asked["request_goodput"]) == (1.0, asked["request_throughput"])


@pytest.mark.parametrize("verb", [offline, serve])
def test_saved_tokens_are_those_of_each_answer(verb: Any, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num-prompts", "2", "--max-input", "9", "--max-output", "3", "--ignore-eos", "--goodput", "ttft:1e6")
    result, _ = verb(capsys, *flags, "--save-tokens")
    assert list(map(len, result["output_token_ids"])) == result["output_lens"]
    assert "output_token_ids" not in verb(capsys, *flags)[0]


def test_a_result_names_the_emulated_link_and_how_much_slower_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num-prompts", "2", "--max-input", "9", "--max-output", "3", "--dtype", "float32", "--swap", "host")
    plain, _ = offline(capsys, *flags)
    (link,) = plain["floodplain"]["hardware"]["links"]
    assert (plain["floodplain"]["hardware"]["emulated"], link["name"]) == (False, "measured")
    paced, _ = offline(capsys, *flags, "--hardware", "emulated-pcie4")
    hardware = paced["floodplain"]["hardware"]
    (link,) = hardware["links"]
    assert hardware["emulated"] is True
    assert hardware["name"].startswith("emulated-pcie4 on ")
    assert link["modelled_bandwidth"] == 25e9
    assert link["bandwidth"] * link["slowdown"] == pytest.approx(25e9)
    assert link["slowdown"] > 1
    config = paced["floodplain"]["config"]
    assert (config["hardware"], config["swap_memory"]) == ("emulated-pcie4", 8 * config["kv_memory"])
    swap = paced["floodplain"]["swap"]
    assert swap["by_tier"] == {tier: {"out_bytes": 0, "in_bytes": 0} for tier in ("peer", "host")}
    assert swap["failed_transfers"] == {"digest_mismatch": 0, "empty_slot": 0, "not_copied": 0}
