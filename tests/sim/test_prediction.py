"""Predictions: exact for one request and for a queue with a known answer, deterministic, and complete."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from floodplain.core.lifecycle import Lifecycle
from floodplain.cost.step_time import PARTS, StepCost
from floodplain.files.profile import Profile
from floodplain.observe.strict_json import save_result
from floodplain.sim.prediction import predict
from floodplain.sim.scenario import Scenario, make_scenario
from floodplain.sim.sweeping import predict_all
from floodplain.workload.traces import TraceRow

COST = StepCost(base_s=0.01, decode_s=1e-4, prefill_token_s=1e-5, context_token_s=1e-7)
BURST = {
    "request_rate": 8.0, "num_prompts": 40, "burst_factor": 5.0, "burst_start": 1.0, "burst_duration": 3.0, "seed": 3,
}  # fmt: skip


def make(folder: Path, cost: StepCost = COST, engine: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    """A small pool, and steps that cost round numbers."""
    parts = {name: getattr(cost, name) for name in PARTS}
    profile = Profile(kind="step", subject="m", machine="m", settings={}, result={**parts, "parts": parts})
    save_result(folder / "steps.json", profile.to_json())
    flags = {"policy": "fcfs", "scheduling": "sync", "kv_blocks": 200} | (engine or {})
    content = {"model": "llama-3.1-8b", "device": "rtx4090", "cost": {"steps": "steps.json"}, "engine": flags}
    return make_scenario(content | changes, "test", folder)


def serve(scenario: Scenario, *rows: TraceRow) -> list[Lifecycle]:
    return predict(scenario, rows).lifecycles


def events(result: dict[str, Any]) -> str:
    return str(result["floodplain"]["simulation"]["events"])


def test_one_request_takes_its_steps_exactly(tmp_path: Path) -> None:
    (life,) = serve(make(tmp_path), TraceRow(0.0, 1000, 5))
    first_s = COST.base_s + 1000 * COST.prefill_token_s
    decodes_s = [COST.base_s + COST.decode_s + (1000 + k) * COST.context_token_s for k in range(1, 5)]
    assert life.token_times_s[0] == pytest.approx(first_s)
    assert life.token_times_s[-1] == pytest.approx(first_s + sum(decodes_s))


@pytest.mark.parametrize(("scheduling", "num_steps"), [("sync", 1), ("async", 2)])
def test_who_arrives_in_a_step_waits_for_the_steps_that_are_planned(
    tmp_path: Path, scheduling: str, num_steps: int
) -> None:
    late_s = 0.035
    first, second = serve(
        make(tmp_path, engine={"scheduling": scheduling}), TraceRow(0.0, 10, 50), TraceRow(late_s, 10, 1)
    )
    ends_s = [when for when in first.token_times_s if when > late_s]  # of the running step, and of later ones
    assert second.token_times_s[0] == ends_s[num_steps]


def test_a_queue_of_equal_services_waits_as_long_as_theory_says(tmp_path: Path) -> None:
    """M/D/1: Poisson arrivals, one request at a time, constant service: the mean wait is rho D / (2 (1 - rho))."""
    service_s, rho, num_requests = 0.1, 0.5, 4000
    dice, now, rows = Random(1), 0.0, []
    for _ in range(num_requests):
        now += dice.expovariate(rho / service_s)
        rows.append(TraceRow(now, 8, 1))
    lives = serve(make(tmp_path, StepCost(base_s=service_s), {"max_num_seqs": 1, "prefix_cache": False}), *rows)
    waits_s = [life.token_times_s[0] - life.arrival_s - service_s for life in lives]
    assert sum(waits_s) / num_requests == pytest.approx(rho * service_s / (2 * (1 - rho)), rel=0.08)
    assert min(waits_s) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("policy", ["fcfs", "timely"])
def test_every_request_gets_its_tokens_and_equal_scenarios_equal_events(tmp_path: Path, policy: str) -> None:
    scenario = make(tmp_path, engine={"policy": policy}, workload=BURST, swap={"memory": "4GiB"})
    result = predict(scenario).result
    assert result["completed"] == BURST["num_prompts"] and result["failed"] == 0
    assert result["total_output_tokens"] == sum(result["output_lens"])
    assert events(predict(scenario).result) == events(result)
    other = make(tmp_path, engine={"policy": policy}, workload=BURST | {"seed": 4}, swap={"memory": "4GiB"})
    assert events(predict(other).result) != events(result)


def test_processes_of_a_sweep_give_what_one_process_gives(tmp_path: Path) -> None:
    scenarios = [make(tmp_path, engine={"policy": policy}, workload=BURST) for policy in ("fcfs", "timely")]
    assert list(map(events, predict_all(scenarios, shows_progress=False))) == [
        events(predict(scenario).result) for scenario in scenarios
    ]


def test_shared_prefixes_are_computed_once(tmp_path: Path) -> None:
    rows = [TraceRow(0.0, 1100, 1, (7, 9)), TraceRow(5.0, 1100, 1, (7, 9)), TraceRow(10.0, 1100, 1, (8, 9))]
    first, same, other = serve(make(tmp_path), *rows)
    assert (first.num_cached_tokens, same.num_cached_tokens, other.num_cached_tokens) == (0, 1024, 0)


def test_a_request_beyond_the_model_is_refused_and_the_others_are_served(tmp_path: Path) -> None:
    rows = [TraceRow(0.0, 10, 3), TraceRow(1.0, 500, 10), TraceRow(2.0, 10, 3)]
    result = predict(make(tmp_path, engine={"max_model_len": 100}), rows).result
    assert (result["completed"], result["failed"]) == (2, 1)
    assert "max_model_len" in result["errors"][1] and result["output_lens"] == [3, 0, 3]


def test_swap_space_replaces_recomputation(tmp_path: Path) -> None:
    def report(**changes: Any) -> dict[str, Any]:
        scenario = make(tmp_path, engine={"policy": "paced", "kv_blocks": 150}, workload=BURST, **changes)
        facts: dict[str, Any] = predict(scenario).result["floodplain"]
        return facts

    with_swap, without = report(swap={"memory": "16GiB", "link": "nvlink4"}), report()
    assert with_swap["preemptions"] and not with_swap["recomputed_tokens"] and with_swap["swap"]["in_bytes"]
    assert without["recomputed_tokens"] and not without["swap"]["in_bytes"]
