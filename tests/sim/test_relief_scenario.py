"""Scenarios with relief: requests keep their tokens across drops and restores; drops gain where they can."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from floodplain.core.errors import UserError
from floodplain.core.lifecycle import Lifecycle, residence_s
from floodplain.core.request import Request
from floodplain.cost.step_time import StepCost
from floodplain.runtime.handover import Record, take_records
from floodplain.runtime.loop import Loop
from floodplain.sim import regrouping
from floodplain.sim.fleet import Fleet
from floodplain.sim.load import Load
from floodplain.sim.machine import resolve_machine
from floodplain.sim.prediction import predict
from floodplain.sim.scenario import Scenario, make_scenario
from tests.sim.test_prediction import measured

BASED = StepCost(base_s=0.03, decode_s=1e-4, prefill_token_s=2e-5)
BURST = {
    "request_rate": 1.5, "num_prompts": 90, "burst_factor": 8.0, "burst_start": 2.0, "burst_duration": 5.0, "seed": 3,
    "goodput": ["ttft:2000"], "length_scale": 0.5, "max_input": 800, "max_output": 400,
}  # fmt: skip
QUICK = {"link": 25e9, "overload": 0.2, "calm": 1.0, "gap": 1.0, "microbatch_tokens": 1024}


def make(folder: Path, relief: dict[str, Any] | None, cost: StepCost = BASED, **changes: Any) -> Scenario:
    """Two instances whose pools hold a few requests each."""
    content = {
        "model": "llama-3.1-8b", "device": "rtx4090", "instances": 2, "cost": measured(folder, cost),
        "engine": {"policy": "fcfs", "kv_blocks": 100, "max_model_len": 1600}, "workload": BURST,
    }  # fmt: skip
    return make_scenario(content | changes | ({} if relief is None else {"relief": relief}), "test", folder)


class KeepingFleet(Fleet):
    """A fleet that keeps the lifecycles of each request, by its id."""

    def __init__(self, scenario: Scenario) -> None:
        self.lives: dict[str, Sequence[Lifecycle]] = {}
        super().__init__(scenario, resolve_machine(scenario), self._keep)

    def _keep(self, request: Request, lives: Sequence[Lifecycle], _: str | None) -> None:
        assert request.request_id not in self.lives, "answered twice"
        self.lives[request.request_id] = lives


def serve(scenario: Scenario) -> KeepingFleet:
    fleet = KeepingFleet(scenario)
    fleet.serve(Load(scenario))
    return fleet


def kinds(fleet: Fleet) -> list[tuple[bool, int]]:
    assert fleet.groups is not None
    return [(one.is_drop, len(one.instances)) for one in fleet.groups.transitions]


def check(scenario: Scenario, fleet: KeepingFleet) -> None:
    """Every request has its tokens, in order; no engine holds a block of a request that ended."""
    for request in Load(scenario):
        lives = fleet.lives[request.request_id]
        times = [when for life in lives for when in life.token_times_s]
        assert len(times) == request.params.max_tokens and times == sorted(times) and times[0] > request.arrival_s
        assert all(residence_s(life) for life in lives if life.token_times_s)
    assert fleet.groups is not None and fleet.groups.num_moving == 0
    for engine in fleet.groups.engines:
        engine.loop.check_integrity()
        assert engine.loop.state.ledger.num_available == engine.loop.state.ledger.num_blocks


def take_without_copies(loop: Loop) -> list[Record]:
    assert not len(loop.state.transfers)
    return take_records(loop)


@pytest.mark.parametrize(("policy", "link"), [("fcfs", "pcie4"), ("timely", "pcie4"), ("paced", 5e8)])
def test_every_request_gets_its_tokens_across_a_drop_and_a_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, link: str | float
) -> None:
    """Under ``timely`` and ``paced`` some are in swap space when layers are dropped, and no copy is under way."""
    monkeypatch.setattr(regrouping, "take_records", take_without_copies)
    engine = {"policy": policy, "kv_blocks": 100, "max_model_len": 1600}
    scenario = make(tmp_path, QUICK, engine=engine, swap={"memory": "8GiB", "link": link})
    fleet = serve(scenario)
    check(scenario, fleet)
    assert kinds(fleet)[0] == (True, 2) and kinds(fleet).count((False, 1)) >= 2
    assert fleet.events == serve(scenario).events
    assert policy == "fcfs" or (fleet.groups is not None and fleet.groups.transitions[0].kv_bytes)


def test_a_pause_waits_for_copies_that_are_under_way(tmp_path: Path) -> None:
    instance = KeepingFleet(make(tmp_path, None)).engines[0]
    calls, instance._driver.num_copying = list[str](), 1
    instance.pause(lambda: calls.append("paused"))
    assert not calls
    instance._driver.num_copying = 0
    instance.advance()
    assert calls == ["paused"]


def test_while_memory_is_enough_nothing_is_dropped(tmp_path: Path) -> None:
    engine = {"policy": "timely", "kv_blocks": 8000}
    with_relief, without = (serve(make(tmp_path, relief, engine=engine)) for relief in (QUICK, None))
    assert kinds(with_relief) == [] and with_relief.events == without.events


@pytest.mark.parametrize(("cost", "pays"), [(BASED, True), (StepCost(decode_s=0.004), False)])
def test_a_priced_drop_is_made_only_if_more_streams_make_more_tokens(
    tmp_path: Path, cost: StepCost, pays: bool
) -> None:
    load = BURST | {"num_prompts": 120, "burst_start": 12.0, "burst_factor": 15.0}
    fleet = serve(make(tmp_path, QUICK | {"mode": "auto"}, cost, workload=load))
    assert ((True, 2) in kinds(fleet)) == pays


def test_a_pipeline_from_the_start_stays_one(tmp_path: Path) -> None:
    scenario = make(tmp_path, QUICK | {"mode": "pipeline", "most_stages": 2})
    fleet = serve(scenario)
    check(scenario, fleet)
    assert kinds(fleet) == [(True, 2)]
    assert all(not life.token_times_s for life in fleet.engines[0].lifecycles.values())


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_request_alone_takes_its_steps_through_all_stages(tmp_path: Path, num_stages: int) -> None:
    """But for hops over a fast link. Its prompt is one chunk for each stage, and each reads all parameters."""
    relief = {"mode": "pipeline", "most_stages": num_stages, "link": 1e12, "remap_s_per_gb": 0.0}
    load = {"request_rate": 1.0, "num_prompts": 1, "goodput": ["ttft:2000"], "max_output": 100}
    scenario = make(tmp_path, relief, instances=num_stages, workload=load)
    (request,) = Load(scenario)
    (life,) = serve(scenario).lives[request.request_id]
    steps_s = BASED.base_s * (2 * num_stages - 1) / num_stages + len(request.prompt_token_ids) * BASED.prefill_token_s
    steps_s += (request.params.max_tokens - 1) * (BASED.base_s + BASED.decode_s)
    assert life.token_times_s[-1] - life.arrival_s == pytest.approx(steps_s, rel=1e-3)


def test_microbatches_of_equal_cost_have_the_fewest_bubbles(tmp_path: Path) -> None:
    """Long prompts at once: their late chunks cost more than early ones with as many tokens."""
    load = {"num_prompts": 12, "length_scale": 30.0, "max_input": 12_000, "max_output": 2, "goodput": ["ttft:2000"]}
    cost = StepCost(base_s=0.001, prefill_token_s=1e-5, self_pair_s=2e-8, prefix_pair_s=2e-8)
    engine = {"policy": "fcfs", "kv_blocks": 8000, "max_model_len": 16_000, "max_batched_tokens": 8192}
    bubbles = {}
    for split in ("even", "tokens"):
        relief = QUICK | {"mode": "pipeline", "most_stages": 2, "split": split}
        result = predict(make(tmp_path, relief, cost, engine=engine, workload=load)).result
        bubbles[split] = result["floodplain"]["simulation"]["relief"]["bubbles"]
    assert 0 < bubbles["even"] < bubbles["tokens"] < 1


def test_a_drop_shortens_the_wait_for_memory(tmp_path: Path) -> None:
    dropped, waited = (predict(make(tmp_path, relief)).result for relief in (QUICK, None))
    assert dropped["p99_ttft_ms"] < 0.5 * waited["p99_ttft_ms"]
    facts = dropped["floodplain"]
    (drop, *restores) = facts["simulation"]["relief"]["transitions"]
    assert max(facts["timeline"]["kv_total_blocks"]) == drop["num_blocks"] > 2 * drop["num_blocks_before"]
    layers = 16 * 436_224_000  # bytes: each pulls 16 of 32 layers
    assert [one["parameter_bytes"] for one in restores] == pytest.approx([layers] * len(restores), rel=0.13)
    assert waited["floodplain"]["simulation"]["relief"] is None


@pytest.mark.parametrize(
    ("relief", "changes", "message"),
    [
        ({}, {"instances": 1}, "test: relief: one instance has no other"),
        ({}, {"expansion": {}}, "test: relief: it does not go with expansion"),
        ({}, {"lender": {"memory": "1GB"}}, "test: relief: it does not go with lender"),
        ({"mode": "maybe"}, {}, "test: relief.mode: "),
        ({"most_stages": 5}, {}, "test: relief.most_stages: "),
        ({"link": "string"}, {}, "test: relief.link: no link is called 'string'"),
        (None, {"lender": {}}, "test: lender.memory: it is required"),
        ({"groups": 2}, {}, "test: relief.groups: there is no such key; there are mode, link"),
    ],
)
def test_bad_input_is_refused_with_its_path(
    tmp_path: Path, relief: dict[str, Any] | None, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as refused:
        make(tmp_path, relief, **changes)
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)
