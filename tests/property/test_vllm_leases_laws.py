"""vLLM's requests on borrowed memory that comes and goes: restored KV is what was computed, whatever was lost.

The machine is in ``tests/support/vllm_leases.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random

import pytest
from hypothesis import HealthCheck, settings

from floodplain.core.errors import InvariantError
from floodplain.core.tiers import Tier
from floodplain.plugins.vllm.books import SwapBooks
from floodplain.runtime.relocations import Relocations
from tests.support.examples import examples
from tests.support.vllm_leases import NUM_CHUNKS, LeasingMachine
from tests.support.vllm_machine import ALL

LeasingMachine.TestCase.settings = settings(
    max_examples=examples(200), stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLeasingMachine = LeasingMachine.TestCase


def take_a_step(machine: LeasingMachine, rng: Random) -> None:
    index, where = rng.randrange(64), {request.where for request in machine.requests}
    rules: list[Callable[[], None]] = [partial(machine.end, index, rng.random() < 0.1)]
    rules += [partial(machine.add, rng.randrange(NUM_CHUNKS)), partial(machine.evacuate, 2)]
    rules += [partial(machine.bring_nearer, 2)]
    if machine.chunks and rng.random() < 0.3:
        rules += [partial(machine.retire, index), partial(machine.tear_away, index, rng.random() < 0.3)]
    if "off" in where:
        rules += [partial(machine.come, index, rng.choice([0, 0, 1, 4]), rng.choice([0, 4, 18]))] * 2
    if "on" in where:
        rules += [partial(machine.compute, index, rng.choice([1, 4, 9]))]
        rules += [partial(machine.back_up, index, rng.randint(1, 3))]
        rules += [partial(machine.leave, index, rng.random() < 0.9)]
    if machine.flights:
        rules += [partial(machine.settle, index, rng.choice([0] * 18 + [1, ALL]))] * 3
    if machine.moves:
        rules += [partial(machine.settle_move, index, rng.random() < 0.9)] * 2
    rng.choice(rules)()


def walk(machine: LeasingMachine, rng: Random, num_steps: int) -> Counter[str]:
    """Run random rules for longer than Hypothesis does; return the counts of events."""
    machine.begin(num_slots=rng.choice([5, 9, 16]), num_blocks=rng.choice([7, 12, 30]))
    for _ in range(num_steps):
        take_a_step(machine, rng)
        machine.every_block_is_held_by_its_owners_and_its_copies_out()
        machine.books_agree_with_what_is_under_way()
        machine.what_can_be_restored_is_there()
        machine.all_slots_are_where_memory_is()
    machine.teardown()
    return machine.seen


def test_long_walks_by_the_same_rules_see_everything() -> None:
    seen = Counter[str]()
    for seed in range(examples(12)):
        seen += walk(LeasingMachine(), Random(seed), num_steps=400)
    assert all(seen[what] > 10 for what in ("evacuated", "emptied", "brought nearer", "torn away with something in it"))


def swap_out_to_a_neighbour(machine: LeasingMachine, num_slots: int = 6) -> None:
    """Swap out a request of eight tokens, to two slots of the neighbour."""
    machine.begin(num_slots=num_slots, num_blocks=4, num_requests=1)
    machine.add(0)
    machine.come(0, num_tokens=8)
    request = machine.requests[0]
    assert machine.books.swap_out(request.tracked, [request.blocks], request.num_computed, reason=None, tier=Tier.PEER)  # type: ignore[arg-type]
    machine._launch(request)
    machine._put_off(request)
    machine.settle(0)
    assert [backup.location.tier for backup in request.tracked.backups] == [Tier.PEER] * 2


def tour(machine: LeasingMachine) -> None:
    """Recalled KV is moved to the host and later promoted; then its chunk is torn away."""
    swap_out_to_a_neighbour(machine)
    (request,) = machine.requests
    machine.retire(0)
    machine.evacuate(4)
    machine.settle_move(0)
    machine.evacuate(4)
    assert not machine.chunks and machine.books.count_restorable(request.tracked) == 8, "nothing is computed again"
    machine.add(1)
    machine.bring_nearer(1)
    machine.settle_move(0)
    assert request.tracked.backups[0].location.tier is Tier.PEER
    machine.what_can_be_restored_is_there()
    machine.tear_away(0)
    machine.what_can_be_restored_is_there()
    machine.books_agree_with_what_is_under_way()
    assert machine.books.count_restorable(request.tracked) == 0
    machine.come(0, num_tokens=8)
    machine.teardown()


def test_a_tour_of_borrowed_memory() -> None:
    tour(LeasingMachine())


def test_without_room_elsewhere_recalled_kv_is_recomputed() -> None:
    machine = LeasingMachine()
    swap_out_to_a_neighbour(machine, num_slots=0)
    machine.retire(0)
    machine.evacuate(4)
    assert not machine.chunks and machine.books.count_restorable(machine.requests[0].tracked) == 0
    machine.teardown()


def test_what_is_on_the_device_too_is_not_copied_from_a_neighbour() -> None:
    machine = LeasingMachine()
    swap_out_to_a_neighbour(machine)
    machine.come(0)
    machine.settle(0)  # its swap-in: it runs
    machine.retire(0)
    machine.evacuate(4)
    assert not machine.moves and not machine.chunks
    machine.teardown()


def keeps_what_is_torn_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Relocations, "abandon", lambda between, tier, slots: None)


def keeps_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapBooks, "drop_lost", lambda books, lost: None)


def believes_all_of_it_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapBooks, "is_on_device", lambda books, backup: True)


def takes_no_request_for_swapped_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapBooks, "swapped_backups", lambda books: ())


@pytest.mark.parametrize(
    "mutate",
    [
        keeps_what_is_torn_away,
        keeps_what_is_lost,
        believes_all_of_it_is_on_the_device,
        takes_no_request_for_swapped_out,
    ],
)
def test_the_tour_notices_books_that(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, InvariantError, IndexError, KeyError, ZeroDivisionError)):
        tour(LeasingMachine())
