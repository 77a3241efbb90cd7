from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.observe.load_table import AllGaps, GapHistogram, summarise
from floodplain.observe.result import (
    EngineReport,
    HardwareReport,
    RunInfo,
    SwapReport,
    TierTraffic,
    benchmark_result,
    jain_index,
)
from floodplain.observe.strict_json import save_result, to_json
from floodplain.workload.records import RequestRecord
from floodplain.workload.spec import parse_goodput
from tests.support.records import make_record

INFO = RunInfo(backend="openai", model_id="m", tokenizer_id="t", request_rate=math.inf, seed=7)


def record(name: str, sent_s: float, *token_times_s: float, **changes: Any) -> RequestRecord:
    facts: dict[str, Any] = {"prompt_tokens": 10, "output_token_ids": tuple(range(len(token_times_s))), "text": name}
    return make_record(*token_times_s, sent_s=sent_s, request_id=name, **(facts | changes))


THREE = [record("a", 0.0, 0.5, 1.0, 2.0), record("b", 1.0, 2.0), record("c", 2.0, 2.25, 2.25, 4.0, arrival_s=1.5)]
FAILED = record("d", 1.0, 1.5, error="HTTP 500: no", finished_s=5.0)


def test_three_requests_by_hand() -> None:
    result = benchmark_result(THREE, INFO)
    assert result["ttfts"] == [0.5, 1.0, 0.25]
    assert result["itls"] == [[0.5, 1.0], [], [0.0, 1.75]]
    assert (result["input_lens"], result["output_lens"], result["errors"]) == ([10] * 3, [3, 1, 3], [""] * 3)
    assert (result["completed"], result["failed"], result["duration"]) == (3, 0, 4.0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 7)
    assert result["request_throughput"] == 3 / 4
    assert result["output_throughput"] == 7 / 4
    assert result["total_token_throughput"] == 37 / 4
    # TTFT 500, 1000, 250 · TPOT (2 - 0.5) / 2 and (4 - 2.25) / 2, none for one token · E2E 2000, 1000, 2000.
    assert result["mean_ttft_ms"] == pytest.approx(1750 / 3)
    assert (result["median_ttft_ms"], result["max_ttft_ms"]) == (500, 1000)
    assert (result["mean_tpot_ms"], result["max_tpot_ms"]) == (812.5, 875)
    assert (result["median_itl_ms"], result["max_itl_ms"]) == (750, 1750)
    assert (result["median_e2el_ms"], result["mean_e2el_ms"]) == (2000, pytest.approx(5000 / 3))
    # Seconds from 0: tokens at .5 | 1 | 2 2 2.25 2.25 | - | 4; all three overlap at no time, two do.
    assert (result["max_output_tokens_per_s"], result["max_concurrent_requests"]) == (4.0, 2)
    own = result["floodplain"]
    assert own["max_token_gap_s"] == 1.75
    # Rates 3/2, 1/1, 3/2 tokens a second of life: (4)^2 / (3 * 5.5).
    assert own["fairness"] == {"jain_index": pytest.approx(16 / 16.5), "max_wait_s": 1.75}
    assert (own["max_send_lag_s"], own["seed"]) == (0.5, 7)
    assert result["request_rate"] == "inf"


def test_a_failed_request_counts_as_failed_and_nowhere_else() -> None:
    with_failed, without = benchmark_result([*THREE, FAILED], INFO), benchmark_result(THREE, INFO)
    assert (with_failed["failed"], with_failed["completed"], with_failed["num_prompts"]) == (1, 3, 4)
    assert with_failed["errors"][3] == "HTTP 500: no"
    assert with_failed["output_lens"][3] == 0
    assert with_failed["duration"] == 5.0
    same = [key for key in without if key.endswith("_ms") or key in ("total_input_tokens", "total_output_tokens")]
    assert len(same) > 25
    assert {key: with_failed[key] for key in same} == {key: without[key] for key in same}


@pytest.mark.parametrize(
    ("limits", "good"),
    [(("ttft:500",), 2), (("ttft:500", "tpot:800"), 1), (("e2el:1000",), 1), (("tpot:1",), 1), (("e2el:1",), 0)],
)
def test_goodput_counts_requests_within_every_limit(limits: tuple[str, ...], good: int) -> None:
    info = RunInfo(backend="openai", model_id="m", tokenizer_id="t", goodput=limits)
    result = benchmark_result(THREE, info)
    assert (result["request_goodput"], result["slo_attainment"]) == (good / 4.0, good / 3)
    assert result["floodplain"]["goals_ms"] == parse_goodput(limits)
    without = benchmark_result(THREE, INFO)
    assert (without["request_goodput"], without["slo_attainment"]) == (None, None)


def test_seconds_are_counted_from_the_first_send_also_of_a_failed_request() -> None:
    ended = record("ended", 0.6, 0.7, 0.8, 1.1, 1.2, 1.3)
    for records, most in ([ended], 5.0), ([record("failed", 0.0, error="refused"), ended], 3.0):
        assert benchmark_result(records, INFO)["max_output_tokens_per_s"] == most


def test_a_failed_request_misses_its_goals() -> None:
    info = RunInfo(backend="openai", model_id="m", tokenizer_id="t", goodput=("ttft:1e9",))
    result = benchmark_result([*THREE, FAILED], info)
    assert (result["slo_attainment"], result["request_goodput"]) == (3 / 4, 3 / 5)
    assert benchmark_result([], info)["slo_attainment"] is None


def test_goodput_reads_names_and_milliseconds() -> None:
    assert parse_goodput(("ttft:500", "e2el:1e4")) == {"ttft": 500.0, "e2el": 10000.0}
    for bad in ("ttft", "ttft:", "ttft:nan", "ttft:0", "wait:5", "ttft:1:2"):
        with pytest.raises(UserError, match="goodput"):
            parse_goodput((bad,))


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(3).gamma(2.0, size=137).tolist()
    summary = summarise(values)
    for percent in (90, 95, 99):
        assert summary[f"p{percent}"] == np.percentile(values, percent)
    assert summary["median"] == np.percentile(values, 50)
    assert (summary["mean"], summary["std"], summary["max"]) == (np.mean(values), np.std(values), max(values))
    assert set(summarise([]).values()) == {None}


def test_jain_index_is_one_for_equals_and_one_over_n_for_a_monopoly() -> None:
    assert jain_index([3.0] * 5) == pytest.approx(1.0)
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([]) is None
    assert jain_index([0.0]) is None


def test_the_engine_part_has_the_promised_keys() -> None:
    swap = SwapReport(out_bytes=5, by_tier={"host": TierTraffic(5, 2)}, failed_transfers={"not_copied": 1})
    engine = EngineReport(preemptions=1, recomputed_tokens=2, wasted_tokens=3, steps=4, scheduler_s=0.5, swap=swap)
    info = RunInfo(
        backend="floodplain",
        model_id="m",
        tokenizer_id="t",
        config={"policy": "fcfs"},
        hardware=HardwareReport(name="emulated-h100", emulated=True, links=({"name": "host"},)),
    )
    own = benchmark_result(THREE, info, engine, {"time_s": [0.0]}, save_tokens=True)["floodplain"]
    assert {
        "version", "config", "hardware", "preemptions", "recomputed_tokens", "wasted_tokens", "swap", "max_token_gap_s",
        "fairness", "steps", "scheduler_s", "seed", "skipped_rows",
    } <= own.keys()  # fmt: skip
    assert own["swap"] == {
        "out_bytes": 5, "in_bytes": 0, "backup_bytes": 0, "stall_s": 0.0,
        "by_tier": {"host": {"out_bytes": 5, "in_bytes": 2}}, "failed_transfers": {"not_copied": 1},
    }  # fmt: skip
    assert own["hardware"] == {"name": "emulated-h100", "emulated": True, "links": ({"name": "host"},)}
    assert own["timeline"] == {"time_s": [0.0]}
    client_only = benchmark_result(THREE, INFO)["floodplain"]
    assert client_only["swap"] is None
    assert client_only["preemptions"] is None


def test_tokens_are_kept_only_on_request() -> None:
    assert "output_token_ids" not in benchmark_result(THREE, INFO)
    assert benchmark_result(THREE, INFO, save_tokens=True)["output_token_ids"][0] == (0, 1, 2)


@pytest.mark.parametrize("records", [[], [FAILED], THREE, [record("e", 0.0, 0.0)]])
def test_json_is_strict_for_any_run(tmp_path: Path, records: list[RequestRecord]) -> None:
    info = RunInfo(
        backend="openai", model_id="m", tokenizer_id="t", config={"rate": math.inf, "path": Path("x"), "n": np.int64(3)}
    )
    save_result(tmp_path / "new" / "r.json", benchmark_result(records, info))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    read = json.loads((tmp_path / "new" / "r.json").read_text(), parse_constant=refuse)
    assert read["floodplain"]["config"] == {"rate": None, "path": "x", "n": 3}
    assert read["num_prompts"] == len(records)


def test_strict_json_covers_what_plain_json_lets_through() -> None:
    value = {"a": [math.nan, -math.inf, 1.5, True, None, np.float32(2.0)], 3: ("x",)}
    assert json.loads(to_json(value)) == {"a": [None, None, 1.5, True, None, 2.0], "3": ["x"]}


# -- gaps in a histogram have the statistics of the gaps, percentiles within 0.05 % ------------------------------------


GAPS = st.lists(st.floats(1e-8, 1e5), max_size=30)


@given(st.lists(GAPS, max_size=4))
def test_histogram_has_the_statistics_of_all_gaps(requests: list[list[float]]) -> None:
    exact, near = AllGaps(), GapHistogram()
    for gaps_s in requests:
        exact.add(np.array(gaps_s))
        near.add(np.array(gaps_s))
    want, got = exact.summarise_ms(), near.summarise_ms()
    assert exact.max_s == near.max_s and want["max"] == got["max"]
    assert want == summarise([gap * 1e3 for gaps_s in requests for gap in gaps_s])
    assert list(want) == list(got)
    if want["mean"] is None:
        assert set(got.values()) == {None}
        return
    assert got["mean"] == pytest.approx(want["mean"], rel=1e-12)
    assert got["std"] == pytest.approx(want["std"], rel=1e-6, abs=1e-6 * want["mean"])
    for name in ("median", "p90", "p95", "p99"):
        assert got[name] == pytest.approx(want[name], rel=5.1e-4)
        assert got[name] <= got["max"]


@given(st.floats(1e-4, 1e2), st.integers(1, 50))
def test_equal_gaps_have_no_deviation(gap_s: float, count: int) -> None:
    gaps = GapHistogram()
    gaps.add(np.full(count, gap_s))
    found = gaps.summarise_ms()
    assert (found["std"], found["mean"]) == (0.0, found["max"])


def test_gaps_outside_the_bins_count() -> None:
    gaps = GapHistogram()
    gaps.add(np.array([0.0, 0.0, 0.0, 1e9]))
    found = gaps.summarise_ms()
    assert (found["median"], found["max"]) == (0.0, 1e12)
    assert found["mean"] == 2.5e11


def test_histogram_of_many_gaps_is_as_large_as_an_empty_one() -> None:
    gaps = GapHistogram()
    before = {name: getattr(value, "nbytes", 0) for name, value in vars(gaps).items()}
    gaps.add(np.random.default_rng(1).gamma(0.5, size=100_000))
    assert {name: getattr(value, "nbytes", 0) for name, value in vars(gaps).items()} == before
    assert sum(before.values()) < 300_000
