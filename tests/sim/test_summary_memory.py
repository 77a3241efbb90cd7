"""A summary has the statistics of the detailed result, and no memory that grows with the tokens of ended requests."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from floodplain.core import changes
from floodplain.core.errors import InvariantError
from floodplain.observe.result import EngineReport
from floodplain.sim import prediction
from floodplain.sim.environment import Environment
from floodplain.sim.fleet import Fleet
from floodplain.sim.prediction import predict
from floodplain.workload.traces import TraceRow
from tests.sim.test_prediction import BURST, make

KEPT_BYTES = 200
"""Most bytes of an ended request: 48 of columns that grow by an eighth, its place in the order, and samples of time."""
EXACT = ("completed", "p99_ttft_ms", "median_tpot_ms", "max_itl_ms", "max_e2el_ms", "max_output_tokens_per_s")
UNEQUAL = ("date", "cpu_s", "scheduler_s", "config", "residence")
TENANTS = {"a": BURST, "b": BURST | {"seed": 4, "request_rate": 3.0}}


@pytest.fixture
def live_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes that are allocated when the last request of each simulation has ended."""
    seen: list[int] = []

    def note(*args: Any) -> EngineReport:
        gc.collect()
        seen.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        return report(*args)

    report = prediction._report
    monkeypatch.setattr(prediction, "_report", note)
    monkeypatch.setattr(changes, "MOST_CHANGES", 64)  # logs are full from the start
    yield seen
    tracemalloc.stop()


@pytest.mark.parametrize(
    "parts",
    [
        {"max_concurrency": 3},
        {"instances": 2, "relief": {"mode": "auto"}},
        {"instances": 2, "relief": {"mode": "pipeline"}},
    ],
)
def test_ended_requests_leave_their_columns_only(tmp_path: Path, live_bytes: list[int], parts: dict[str, Any]) -> None:
    scenario = make(tmp_path, detailed=False, engine={"prefix_cache": False}, **parts)  # no memory that fills up
    rows = [TraceRow(0.06 * (place // 4), 60, 3) for place in range(160)]
    detailed = replace(scenario, detailed=True)
    for each, num_requests in [(scenario, 80), (scenario, 80), (scenario, 160), (detailed, 80), (detailed, 160)]:
        tracemalloc.start()
        assert predict(each, rows[:num_requests]).result["completed"] == num_requests
    _, *summed, few, many = live_bytes  # the first one fills caches of functions
    assert summed[1] - summed[0] <= 80 * KEPT_BYTES
    assert many - few > 80 * 3 * KEPT_BYTES  # the measure sees records


@pytest.mark.parametrize(
    "parts",
    [
        {"tenants": TENANTS, "max_concurrency": 5},
        {"workload": BURST, "instances": 2, "faults": [{"at": 1.5, "instance": 1, "down": 1.0}]},
        {"workload": BURST | {"goodput": ["ttft:50"]}, "engine": {"max_model_len": 700}},
    ],
)
def test_summary_is_the_detailed_result_without_its_lists(tmp_path: Path, parts: dict[str, Any]) -> None:
    scenario = make(tmp_path, **parts)
    detailed, summary = predict(scenario), predict(make(tmp_path, detailed=False, **parts))
    assert not summary.lifecycles and "residence" not in summary.result["floodplain"]
    lists = {name for name, value in detailed.result.items() if isinstance(value, list)}
    assert lists and detailed.result.keys() - summary.result.keys() == lists
    (numbers, texts), (exact, same_texts) = (split(one.result, lists) for one in (summary, detailed))
    assert texts == same_texts
    assert numbers == pytest.approx(exact, rel=5.1e-4)
    assert {name: numbers[name] for name in EXACT} == {name: exact[name] for name in EXACT}


def split(result: dict[str, Any], lists: set[str]) -> tuple[dict[str, float], dict[str, str]]:
    """Numbers and all else of a result, without its lists, the setting, and times of this machine."""
    flat = {path: value for path, value in flatten(result) if path.rpartition(".")[2] not in (*lists, *UNEQUAL)}
    numbers = {path: value for path, value in flat.items() if isinstance(value, int | float)}
    return numbers, {path: repr(value) for path, value in flat.items() if path not in numbers}


def flatten(result: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in result.items():
        if isinstance(value, dict) and name not in ("config", "residence"):
            yield from flatten(value, f"{path}{name}.")
        else:
            yield path + name, value


def test_unanswered_request_is_loud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fleet, "_note_ended", lambda fleet, ended: None)
    for detailed in (False, True):
        with pytest.raises(InvariantError, match="1 of 1 requests were not answered"):
            predict(make(tmp_path, detailed=detailed, workload={"num_prompts": 1, "goodput": ["ttft:1"]}))


def test_events_of_a_stream_run_as_if_scheduled_at_once() -> None:
    def play(*, at_once: bool) -> list[str]:
        environment, seen = Environment(), list[str]()

        def note(name: str) -> None:
            seen.append(name)
            if name == "b":
                environment.schedule(environment.now, lambda: seen.append("of b"))

        environment.schedule(2.0, lambda: note("before"))
        stream = [(when, lambda name=name: note(name)) for when, name in ((1.0, "a"), (2.0, "b"), (2.0, "c"))]
        if at_once:
            for when, event in stream:
                environment.schedule(when, event)
        else:
            environment.schedule_all(iter(stream))
        environment.schedule(2.0, lambda: note("after"))
        environment.run()
        return seen

    assert play(at_once=False) == play(at_once=True) == ["a", "before", "b", "c", "after", "of b"]


def test_stream_out_of_order_is_refused() -> None:
    environment = Environment()
    environment.schedule_all(iter([(2.0, lambda: None), (1.0, lambda: None)]))
    with pytest.raises(InvariantError, match=r"an event at 1\.0 s is read from its stream at 2\.0 s"):
        environment.run()
