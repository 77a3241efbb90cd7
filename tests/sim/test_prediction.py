"""Predictions: exact for one request and for a queue with a known answer, deterministic, and complete."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from floodplain.core.errors import UserError
from floodplain.core.lifecycle import Lifecycle
from floodplain.cost.step_time import PARTS, StepCost
from floodplain.files.profile import Profile
from floodplain.observe.strict_json import save_result
from floodplain.sim.fleet import Fleet
from floodplain.sim.load import Load
from floodplain.sim.machine import resolve_machine
from floodplain.sim.prediction import predict
from floodplain.sim.scenario import Scenario, make_scenario
from floodplain.sim.sweeping import predict_all
from floodplain.workload.traces import TraceRow

COST = StepCost(base_s=0.01, decode_s=1e-4, prefill_token_s=1e-5, context_token_s=1e-7)
BURST = {
    "request_rate": 8.0, "num_prompts": 40, "burst_factor": 5.0, "burst_start": 1.0, "burst_duration": 3.0, "seed": 3,
}  # fmt: skip


def measured(folder: Path, cost: StepCost) -> dict[str, str]:
    """The ``cost`` of a scenario: a file of measured steps."""
    parts = {name: getattr(cost, name) for name in PARTS}
    profile = Profile(kind="step", subject="m", machine="m", settings={}, result={**parts, "parts": parts})
    save_result(folder / "steps.json", profile.to_json())
    return {"steps": "steps.json"}


def make(folder: Path, cost: StepCost = COST, engine: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    """A small pool, and steps that cost round numbers."""
    flags = {"policy": "fcfs", "scheduling": "sync", "kv_blocks": 200} | (engine or {})
    content = {"model": "llama-3.1-8b", "device": "rtx4090", "cost": measured(folder, cost), "engine": flags}
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
    _, again = serve(make(tmp_path), *[TraceRow(5.0 * place, 1100, 1, (7, 9, 4)) for place in range(2)])
    assert again.num_cached_tokens == 1088  # a trace names the last, shorter block of a prompt, too


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


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_requests_that_arrive_in_one_step_are_spread_over_instances(tmp_path: Path, scheduling: str) -> None:
    scenario = make(tmp_path, StepCost(base_s=1.0), {"scheduling": scheduling}, instances=2)
    fleet = Fleet(scenario, resolve_machine(scenario), lambda *_: None)
    fleet.serve(Load(scenario, [TraceRow(0.01 * place, 300, 3) for place in range(8)]))
    assert [engine.loop.num_submitted for engine in fleet.engines] == [4, 4]


def test_two_instances_share_the_load_and_one_takes_over_when_the_other_dies(tmp_path: Path) -> None:
    rows = [TraceRow(0.1 * place, 300, 60) for place in range(30)]
    one, two = (predict(make(tmp_path, instances=number), rows).result for number in (1, 2))
    assert two["mean_ttft_ms"] < one["mean_ttft_ms"]

    hurt = predict(make(tmp_path, instances=2, faults=[{"at": 1.5, "instance": 1, "down": 1.0}]), rows)
    assert hurt.result["output_lens"] == [60] * 30
    assert hurt.result["floodplain"]["recomputed_tokens"] == 0  # known tokens count as prompts of the other instance
    assert one["mean_e2el_ms"] > hurt.result["mean_e2el_ms"] > two["mean_e2el_ms"]
    times_s = [life.token_times_s for life in hurt.lifecycles]
    assert all(times == sorted(times) for times in times_s)


def test_while_no_instance_is_there_requests_wait(tmp_path: Path) -> None:
    server = {"instances": 2, "servers": [["instance-0", "instance-1"]]}
    for changes in (
        {"faults": [{"at": 0.5, "down": 3.0}]},
        server | {"faults": [{"at": 0.5, "server": 0, "down": 3.0}]},
    ):
        (life,) = serve(make(tmp_path, **changes), TraceRow(1.0, 10, 2))
        assert life.token_times_s[0] == pytest.approx(3.5 + COST.base_s + 10 * COST.prefill_token_s)


def test_lent_memory_is_used_recalled_and_used_again(tmp_path: Path) -> None:
    lender = {"memory": "16GiB", "busy": [[2.0, 4.0]]}
    engine = {"policy": "paced", "kv_blocks": 150}
    load = BURST | {"num_prompts": 60}

    def serve_with(**changes: Any) -> dict[str, Any]:
        facts: dict[str, Any] = predict(make(tmp_path, engine=engine, workload=load, **changes)).result["floodplain"]
        return facts

    calm = serve_with(lender=lender | {"busy": []})
    to_host = serve_with(lender=lender, swap={"memory": "16GiB"})
    lost = serve_with(lender=lender)
    assert calm["swap"]["in_bytes"] and not calm["recomputed_tokens"] and not calm["simulation"]["recalls_s"]
    (recall_s,), (drop_s,) = to_host["simulation"]["recalls_s"], lost["simulation"]["recalls_s"]
    assert 1.0 > recall_s > drop_s > 0.0  # some hundred blocks of 2 MiB over PCIe; without host memory they are lost
    for_good = serve_with(lender=lender | {"busy": [[2.0, 1e6]]})
    assert for_good["swap"]["in_bytes"] < lost["swap"]["in_bytes"]
    assert to_host["recomputed_tokens"] < 0.5 * lost["recomputed_tokens"]


def test_streamed_layers_hold_more_requests_and_stall_over_a_slow_link(tmp_path: Path) -> None:
    load = BURST | {"request_rate": 30.0, "max_output": 200}

    def serve_with(**part: Any) -> dict[str, Any]:
        expansion = {"expansion": part} if part else {}
        return predict(make(tmp_path, engine={"kv_blocks": 300}, workload=load, **expansion)).result

    plain, expanded, slow = serve_with(), serve_with(factor=2.0, link="c2c"), serve_with(factor=2.0, link="pcie4")
    facts = {name: each["floodplain"]["simulation"] for name, each in (("c2c", expanded), ("pcie4", slow))}
    assert expanded["output_throughput"] > 1.2 * plain["output_throughput"]
    assert facts["c2c"]["stream_stall_s"] < 0.05 * expanded["duration"] < facts["pcie4"]["stream_stall_s"]
    auto = serve_with(link="c2c")
    assert auto["output_throughput"] > 1.1 * plain["output_throughput"]
    assert auto["floodplain"]["simulation"]["most_streamed_layers"] > 0


def test_a_tenant_beyond_its_share_does_not_delay_another_under_fair_by_key(tmp_path: Path) -> None:
    tenants = {
        "calm": {"request_rate": 1.0, "num_prompts": 15, "max_input": 800, "seed": 1},
        "greedy": {"request_rate": 50.0, "num_prompts": 120, "max_input": 800, "seed": 2},
    }
    p99_ms = {}
    for policy in ("fcfs", "fair"):
        engine = {"policy": policy} | ({"fair_by": "key"} if policy == "fair" else {})
        result = predict(make(tmp_path, engine=engine, tenants=tenants, swap={"memory": "16GiB"})).result
        by_tenant = result["floodplain"]["simulation"]["tenants"]
        assert {name: each["completed"] for name, each in by_tenant.items()} == {"calm": 15, "greedy": 120}
        p99_ms[policy] = by_tenant["calm"]["p99_ttft_ms"]
    assert p99_ms["fair"] < 0.5 * p99_ms["fcfs"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"swap": {"memory": 16}}, "swap.memory: 16B is less than one KV block of 2 MiB: raise it"),
        ({"lender": {"memory": "3MiB"}, "tensor_parallel": 2}, None),
        (
            {"lender": {"memory": "1MiB"}, "tensor_parallel": 2},
            "lender.memory: 1MiB is less than one KV block of 2 MiB",
        ),
    ],
)
def test_memory_below_a_block_is_refused(tmp_path: Path, changes: dict[str, Any], words: str | None) -> None:
    scenario = make(tmp_path, **changes)
    if words is None:
        resolve_machine(scenario)
        return
    with pytest.raises(UserError, match=words):
        resolve_machine(scenario)


def test_a_tenants_goals_are_its_own_and_skipped_rows_are_counted(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("t_s,prompt_tokens,output_tokens\n0,50,3\n1,0,3\n2,50,3\n")
    trace = {"trace": "t.csv"}
    tenants = {"lax": trace | {"goodput": ["e2el:1000"]}, "strict": trace | {"goodput": ["ttft:0.001"]}, "none": trace}
    result = predict(make(tmp_path, tenants=tenants)).result
    got = {name: each["slo_attainment"] for name, each in result["floodplain"]["simulation"]["tenants"].items()}
    assert got == {"lax": 1.0, "strict": 0.0, "none": 1.0}
    assert result["floodplain"]["skipped_rows"] == 3 and result["completed"] == 6
