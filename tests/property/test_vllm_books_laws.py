"""Swap space for vLLM's requests against plain contents: restored KV is what was computed, in any order of events.

The machine is in ``tests/support/vllm_machine.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

import pytest
from hypothesis import HealthCheck, settings

from floodplain.core.errors import InvariantError
from floodplain.plugins.vllm import books
from floodplain.plugins.vllm.books import SwapBooks
from tests.support.controls import Broken, Controls, Fault
from tests.support.examples import examples
from tests.support.vllm_books import BLOCK_TOKENS, Block
from tests.support.vllm_machine import ALL, BooksMachine, ContentMachine

BooksMachine.TestCase.settings = settings(
    max_examples=examples(200), stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestBooksMachine = BooksMachine.TestCase
ContentMachine.TestCase.settings = settings(BooksMachine.TestCase.settings, max_examples=examples(15))
TestContentMachine = ContentMachine.TestCase


def walk(machine: BooksMachine, rng: Random, num_steps: int) -> None:
    """Run random rules for longer than Hypothesis does, with all invariants checked after each."""
    machine.begin(num_slots=rng.choice([5, 9, 16]), num_blocks=rng.choice([7, 12, 30]))
    for _ in range(num_steps):
        index, where = rng.randrange(64), {request.where for request in machine.requests}
        rules: list[Callable[[], None]] = [partial(machine.end, index, rng.random() < 0.1)]
        rules += [partial(machine.reset, rng.random() < 0.1)]
        if "off" in where:
            rules += [partial(machine.come, index, rng.choice([0, 0, 1, 4]), rng.choice([0, 4, 18]))]
            rules += [partial(machine.cut_away, index, rng.choice([4, 9, 18, 18, 18]))]
        if "on" in where:
            rules += [partial(machine.compute, index, rng.choice([1, 4, 9]))]
            rules += [partial(machine.back_up, index, rng.randint(1, 3))]
            rules += [partial(machine.cut, index, rng.choice([4, 9, 18, 18]))]
            rules += [partial(machine.leave, index, rng.random() < 0.8)]
        if isinstance(machine, ContentMachine):
            rules += [partial(machine.finish, index, rng.choice([0.5, 1.0, 2.0]))] * ("on" in where)
            rules += [partial(machine.unpin, index)] * bool(machine.pins)
            machine.what_is_found_by_content_is_there()
        if machine.flights:
            rules += [partial(machine.settle, index, rng.choice([0] * 12 + [1, 2, ALL]))] * 2
        rng.choice(rules)()
        machine.every_block_is_held_by_its_owners_and_its_copies_out()
        machine.books_agree_with_what_is_under_way()
        machine.what_can_be_restored_is_there()
    machine.teardown()


@pytest.mark.parametrize("seed", range(examples(12)))
def test_a_long_walk_by_the_same_rules(seed: int) -> None:
    walk(BooksMachine(), Random(seed), num_steps=400)


@pytest.mark.parametrize("seed", range(examples(12)))
def test_a_long_walk_where_copies_are_found_by_content(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books, "SAVED_TOGETHER", 1 + seed % 3)
    machine = ContentMachine()
    walk(machine, Random(seed), num_steps=400)
    assert machine.num_adopted > 5


def tour(machine: BooksMachine) -> None:
    """One request is swapped out with a tail, another takes its blocks at once; then they alternate, twice."""
    machine.begin(num_slots=6, num_blocks=3, num_requests=2)
    machine.come(0, num_tokens=4)
    machine.back_up(0, 1)
    machine.compute(0, 6)
    machine.leave(0)
    machine.come(1)  # and computes nothing while copies hold all blocks
    machine.settle(1)
    machine.settle(0)
    machine.compute(0, 10)
    machine.leave(0)
    machine.settle(0)
    machine.come(0)  # the first request, with its tail
    machine.settle(0)
    machine.compute(0, 1)
    machine.leave(0, swaps=False)
    machine.come(1)
    machine.settle(0, ALL)  # a swap-in that is not whole: its backups are lost
    machine.what_can_be_restored_is_there()
    machine.come(1, num_tokens=4)
    machine.leave(0)
    machine.what_can_be_restored_is_there()
    machine.settle(0, ALL)
    machine.what_can_be_restored_is_there()
    machine.settle_all()
    machine.come(0, num_tokens=9)
    machine.leave(0)
    machine.reset()  # during a swap-out
    machine.every_block_is_held_by_its_owners_and_its_copies_out()
    machine.come(0, num_tokens=9)  # into the same blocks
    machine.what_can_be_restored_is_there()
    machine.settle_all()
    machine.leave(0)
    machine.settle_all()
    machine.come(0)
    machine.reset()  # during a swap-in
    machine.every_block_is_held_by_its_owners_and_its_copies_out()
    machine.come(1, num_tokens=4)
    machine.settle_all()
    machine.what_can_be_restored_is_there()
    machine.teardown()


def test_a_tour_of_leaving_and_coming_back() -> None:
    tour(BooksMachine())


class InertPool:
    """Replaces the pool; holds nothing."""

    def touch(self, blocks: Sequence[Block]) -> None: ...

    def free_blocks(self, ordered_blocks: Sequence[Block]) -> None: ...


CONTROLS = Controls()
CONTROLS.add("holds_no_blocks", SwapBooks, "bind", lambda bind, books, pool: bind(books, InertPool()))
CONTROLS.add("keeps_a_tail_that_is_out_of_date", SwapBooks, "note_start", lambda _, books, tracked: None)
CONTROLS.add("trusts_a_copy_that_failed", SwapBooks, "settle", lambda settle, *about: settle(*about[:-1], frozenset()))
CONTROLS.add(
    "restores_in_the_wrong_order",
    SwapBooks,
    "fetch",
    lambda fetch, books, one, blocks, *ends: fetch(books, one, [blocks[0][::-1]], *ends),
)
CONTROLS.add(
    "restores_before_it_is_whole", SwapBooks, "count_restorable", lambda _, books, one: len(one.backups) * BLOCK_TOKENS
)


@CONTROLS.breaks(SwapBooks, "void_copies")
def waits_for_a_void_copy(void: Broken, books: SwapBooks) -> None:
    void(books)
    for move in books.transfers:
        move.cargo.is_void = False


CONTROLS.add("forgets_no_copy", SwapBooks, "void_copies", lambda _, books: None)


@pytest.mark.parametrize("fault", CONTROLS)
def test_the_machine_notices_books_that(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, InvariantError, KeyError)):
        tour(BooksMachine())
