"""Leases between simulated engines: the product's coordinator, lender and PEER tier in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from floodplain.core.errors import UserError
from floodplain.cost.step_time import StepCost
from floodplain.sim.fleet import Fleet
from floodplain.sim.leasing import VirtualPool
from floodplain.sim.machine import resolve_machine
from floodplain.sim.prediction import predict
from floodplain.sim.scenario import Scenario
from tests.sim.test_prediction import make

COST = StepCost(base_s=0.05, decode_s=1e-4, prefill_token_s=1e-5, context_token_s=1e-7)
ENGINE = {"policy": "paced", "kv_blocks": 100, "max_model_len": 1200}
SHORT = {"max_input": 600, "max_output": 100}
LOAD = SHORT | {
    "request_rate": 1.0, "num_prompts": 50, "burst_factor": 8.0, "burst_start": 14.0, "burst_duration": 4.0, "seed": 3,
}  # fmt: skip
QUIET = {"request_rate": 1.0, "num_prompts": 40, "seed": 5, "max_input": 200, "max_output": 20}
BUSY = SHORT | {
    "request_rate": 0.3, "num_prompts": 70, "burst_factor": 60.0, "burst_start": 20.0, "burst_duration": 4.0, "seed": 5,
}  # fmt: skip
LENDER = {"model": "llama-3.1-8b", "engine": {"policy": "fcfs", "kv_blocks": 600, "max_model_len": 1200}}
BORROW = {"memory": "512MiB", "lease": "32MiB"}


def lend(folder: Path, workload: dict[str, Any], **changes: Any) -> Scenario:
    """One instance with a burst, and one lender with a load of its own."""
    lender = LENDER | {"workload": workload, "cost": {"steps": "steps.json"}}
    parts = {"borrow": BORROW, "lenders": {"chat": lender}, "swap": {"memory": "4GiB"}, "workload": LOAD}
    return make(folder, COST, ENGINE, **(parts | changes))


def facts_of(scenario: Scenario) -> dict[str, Any]:
    result = predict(scenario).result
    assert result["failed"] == 0 and result["completed"] == LOAD["num_prompts"]
    facts: dict[str, Any] = result["floodplain"]["simulation"]
    lent = facts["leases"]["bytes"]
    assert lent["granted"] == lent["recalled"] + lent["returned"] + lent["lost"] + lent["live"]
    return facts


@pytest.mark.slow
def test_an_idle_lender_lends_and_its_burst_recalls(tmp_path: Path) -> None:
    calm, busy = (facts_of(lend(tmp_path, load))["leases"] for load in (QUIET, BUSY))
    assert calm["leases"]["granted"] > 0 and calm["leases"]["recalled"] == 0
    assert busy["leases"]["recalled"] > 0 and busy["moved_to_host_bytes"] > 0
    assert calm["moved_to_host_bytes"] == 0 and calm["leases"]["lost"] == busy["leases"]["lost"] == 0


@pytest.mark.slow
def test_a_lender_whose_load_leaves_nothing_lends_nothing(tmp_path: Path) -> None:
    """The control: the same lender with a pool that its longest request fills."""
    engine = LENDER["engine"] | {"kv_blocks": 75}  # type: ignore[operator]
    lender = LENDER | {"engine": engine, "workload": QUIET, "cost": {"steps": "steps.json"}}
    leases = facts_of(lend(tmp_path, QUIET, lenders={"chat": lender}))["leases"]
    assert not any(leases["bytes"].values())


@pytest.mark.slow
def test_equal_scenarios_have_equal_events_and_leases(tmp_path: Path) -> None:
    first, again = (facts_of(lend(tmp_path, BUSY)) for _ in range(2))
    assert first["events"] == again["events"] and first["leases"] == again["leases"]


@pytest.mark.slow
def test_while_no_coordinator_answers_leases_stay_and_none_is_granted(tmp_path: Path) -> None:
    """It is dead from before the lender's first offer, or from after it; recalls wait for the next coordinator."""
    never = facts_of(lend(tmp_path, QUIET, coordinator={"down": [[1.0, 1e6]]}))["leases"]
    assert not any(never["bytes"].values())

    later = facts_of(lend(tmp_path, BUSY, coordinator={"down": [[12.0, 1e6]]}))["leases"]
    assert later["bytes"]["live"] > 0 and later["leases"]["recalled"] == 0

    back = facts_of(lend(tmp_path, BUSY, coordinator={"down": [[12.0, 22.0]]}))["leases"]
    assert back["leases"]["recalled"] > 0


@pytest.mark.slow
def test_leases_of_a_borrower_that_dies_are_lost_after_a_ttl(tmp_path: Path) -> None:
    facts = facts_of(lend(tmp_path, QUIET, faults=[{"at": 15.0, "down": 15.0}]))
    lost = facts["leases"]["bytes"]["lost"]
    assert lost > 0 and facts["leases"]["leases"]["granted"] > facts["leases"]["leases"]["lost"]
    gone_s = next(
        t for t, num_bytes in zip(*facts["leases"]["lent"].values(), strict=True) if t > 15.0 and not num_bytes
    )
    assert 24.0 <= gone_s < 27.0  # 10 s after its last heartbeat


@pytest.mark.slow
def test_what_a_failed_server_has_lent_is_lost_and_computed_again(tmp_path: Path) -> None:
    servers = {"servers": [["instance-0"], ["chat-0"]], "faults": [{"at": 16.0, "server": 1, "down": 5.0}]}
    hurt, calm = (predict(lend(tmp_path, QUIET, **parts)).result["floodplain"] for parts in (servers, {}))
    leases = hurt["simulation"]["leases"]
    assert leases["leases"]["lost"] > 0 and leases["forced"] == leases["leases"]["lost"]
    assert hurt["recomputed_tokens"] > calm["recomputed_tokens"]


def test_a_lenders_pool_gives_way_down_to_what_is_used_and_takes_all_back(tmp_path: Path) -> None:
    machine = resolve_machine(lend(tmp_path, QUIET).lenders["chat"])
    fleet = Fleet(lend(tmp_path, QUIET).lenders["chat"], machine, lambda *_: None)
    loop = fleet.engines[0].loop
    pool = VirtualPool(loop, machine.block_bytes, least_blocks=75)
    used = loop.state.ledger.allocate(200)
    pool.give_way(pool.full_bytes // 2)
    assert pool.own_bytes == pool.full_bytes // 2
    pool.shrink(0)
    assert pool.own_bytes == 200 * machine.block_bytes
    pool.take_back(pool.full_bytes)
    assert pool.own_bytes == pool.full_bytes
    assert used is not None
    loop.state.ledger.check_integrity()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"borrow": None}, "borrow and lenders go together"),
        ({"lender": {"memory": "1GiB"}}, "lender: borrow says what is lent"),
        ({"coordinator": {"pairs": {"instance-0": ["chat-7"]}}}, "coordinator.pairs.instance-0: there is no chat-7"),
        ({"coordinator": {"pairs": {"chat-0": ["instance-0"]}}}, "coordinator.pairs.chat-0: .* cyclic"),
        ({"coordinator": {"pairs": {"instance-0": ["instance-0"]}}}, "instance-0 borrows, and so it cannot lend"),
        ({"coordinator": {"down": [[5, 2]]}}, "coordinator.down: times must rise"),
        ({"coordinator": {"ttl": -1}}, "coordinator.ttl: Input should be greater than 0"),
        ({"coordinator": {"nodes": 3}}, "coordinator.nodes: there is no such key; there are ttl, deadline, down"),
        ({"servers": [["chat-0"], ["chat-0"]]}, "servers: chat-0 is on two of them"),
        ({"servers": [["chat-3"]]}, "servers.0: there is no chat-3; there are instance-0, chat-0"),
        ({"faults": [{"at": 1, "server": 2}]}, "faults.0.server: there is no server 2"),
        ({"faults": [{"at": 1, "server": 0, "instance": 0}]}, "faults.0: an instance fails, or a server"),
        ({"lenders": {"instance": LENDER}}, "lenders.instance: a lender's name"),
        ({"lenders": {"chat": LENDER | {"borrow": BORROW}}}, "lenders.chat.borrow: .* cannot borrow"),
        ({"lenders": {"chat": LENDER | {"instances": -1}}}, "lenders.chat: instances: Input should be greater"),
    ],
)
def test_what_contradicts_itself_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem) as refused:
        lend(tmp_path, QUIET, **changes)
    assert "\n" not in str(refused.value)
