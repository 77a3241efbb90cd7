"""The runs of benchmarks/peers: a model is not needed, runs are equal, and every way decides otherwise than FCFS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.loads import LOADS
from benchmarks.peers.measure import HARDWARE_NAME, make_way, measure
from benchmarks.peers.ways import CLASSES, FCFS, FLAGS, OURS
from benchmarks.vllm.measure import make_clock, make_engine, measure_burst
from benchmarks.vllm.story import make_burst
from benchmarks.vllm.virtual import write_tiny_model

GOALS_S = (0.6, 0.07)
KV_TOKENS = 2048
LOAD = "tenants"
NUM_REQUESTS = 32


@pytest.fixture(autouse=True)
def short_load(monkeypatch: pytest.MonkeyPatch) -> None:
    make = LOADS[LOAD]
    monkeypatch.setattr("benchmarks.peers.measure.LOADS", {LOAD: lambda seed: make(seed)[:NUM_REQUESTS]})
    monkeypatch.setattr("benchmarks.peers.measure.KV_TOKENS", KV_TOKENS)


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return {}


def run(way: str, seed: int = 1) -> dict[str, Any]:
    found = measure(way, LOAD, seed, GOALS_S)
    del found["way"]
    return found


@pytest.mark.parametrize("way", [*FLAGS, *CLASSES, *OURS])
def test_runs_are_equal_and_differ_from_fcfs(way: str, plain: dict[str, Any]) -> None:
    plain.setdefault("run", run(FCFS))
    first = run(way)
    assert first == run(way)
    assert len(first["ttft_s"]) == NUM_REQUESTS
    assert (first == plain["run"]) is (way == FCFS)


def test_control_another_seed_has_another_run(plain: dict[str, Any]) -> None:
    plain.setdefault("run", run(FCFS))
    assert run(FCFS, seed=2) != plain["run"] | {"seed": 2}


@pytest.mark.parametrize("way", [FCFS, "timely"])
def test_run_without_a_model_has_the_times_of_one_with_a_model(way: str, tmp_path: Path) -> None:
    burst = make_burst(1, 20, 4.58)
    llm, clock = make_way(way, GOALS_S, KV_TOKENS)
    bare = measure_burst(llm, burst, clock)
    name = "stock" if way == FCFS else way
    real = make_engine(name, str(write_tiny_model(tmp_path)), KV_TOKENS, "float32", swap_memory="64MiB")
    assert measure_burst(real, burst, make_clock(real, HARDWARE_NAME)) == bare
    assert bare["preemptions"], "the pool was large enough for all requests"
