"""The vLLM plug-in's scheduler side: a copy ends with its last worker, and is whole if all have it whole."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.cache_groups import CacheGroup
from floodplain.core.plan import Decision, Reason, TransferKind
from floodplain.core.tiers import CopyTime, Direction, Tier
from floodplain.core.view import View
from floodplain.plugins.vllm.messages import COPY, StepOrders, WorkerReport
from floodplain.plugins.vllm.settings import PluginSettings
from floodplain.plugins.vllm.swap_controller import FIRST_BANDWIDTH, SwapController
from floodplain.plugins.vllm.tracked import TrackedRequest
from tests.support.vllm_books import Block, Pool

BLOCK_BYTES, BLOCK_TOKENS = 1024, 4
NONE, FIRST = frozenset[int](), frozenset({0})
"""Lost blocks, of three."""


class Office:
    """A controller over a pool, and requests with three blocks to swap out."""

    def __init__(self, num_workers: int, num_slots: int = 32) -> None:
        settings = PluginSettings(swap_bytes=num_slots * BLOCK_BYTES + BLOCK_BYTES - 1)
        self.controller = SwapController(settings, BLOCK_BYTES, [CacheGroup(BLOCK_TOKENS)], num_workers)
        self.pool = Pool(64)
        self.controller.books.bind(self.pool)
        self.names = (f"request-{number}" for number in count())

    def arrive(self) -> TrackedRequest:
        request = SimpleNamespace(request_id=next(self.names), num_output_tokens=0, priority=0)
        return self.controller.roster.arrive(cast(Any, request), 0.0)

    def send_away(self) -> tuple[TrackedRequest, list[Block], int]:
        """Swap out a request with ten tokens: the request, its blocks, and the copy that began."""
        one, blocks = self.arrive(), self.pool.give(3)
        assert self.controller.books.swap_out(one, [blocks], 10, Reason.SLICE_ENDED)
        self.pool.free_blocks(blocks)
        (transfer,) = self.controller.take_orders(is_idle=False).transfers
        return one, blocks, transfer.transfer_id

    def tell(self, ended: dict[int, tuple[int, frozenset[int]]]) -> None:
        self.controller.note_report(WorkerReport(ended))


def test_a_copy_is_settled_when_both_workers_have_reported_it() -> None:
    office = Office(num_workers=2)
    one, blocks, copy = office.send_away()
    office.tell({copy: (1, NONE)})
    office.tell({})
    assert len(office.controller.books.transfers) == 1
    assert all(block.ref_cnt == 1 for block in blocks)
    assert office.controller.books.count_restorable(one) == 0
    office.tell({copy: (1, NONE)})
    assert len(office.controller.books.transfers) == 0
    assert all(block.ref_cnt == 0 for block in blocks)
    assert office.controller.books.count_restorable(one) == 10


@pytest.mark.parametrize("said", [[(2, NONE)], [(1, NONE), (1, NONE)]])
def test_the_number_of_steps_in_which_workers_report_does_not_matter(said: list[tuple[int, frozenset[int]]]) -> None:
    office = Office(num_workers=2)
    one, _, copy = office.send_away()
    for words in said:
        assert len(office.controller.books.transfers) == 1
        office.tell({copy: words})
    assert len(office.controller.books.transfers) == 0
    assert office.controller.books.count_restorable(one) == 10


@pytest.mark.parametrize("said", [[(2, FIRST)], [(1, NONE), (1, FIRST)], [(1, FIRST), (1, NONE)]])
def test_a_copy_that_one_worker_does_not_have_whole_is_not_whole(said: list[tuple[int, frozenset[int]]]) -> None:
    office = Office(num_workers=2)
    one, blocks, copy = office.send_away()
    for words in said:
        office.tell({copy: words})
    assert len(office.controller.books.transfers) == 0
    assert all(block.ref_cnt == 0 for block in blocks)
    assert office.controller.books.count_restorable(one) == 0
    assert office.controller.books.backups.is_at_rest


@pytest.mark.parametrize(("place", "num_left"), [(0, 0), (1, 4), (2, 8)])
def test_a_block_that_one_worker_does_not_have_back_is_lost_for_all(place: int, num_left: int) -> None:
    """Blocks before it are whole and can be fetched again."""
    office = Office(num_workers=2)
    one, _, copy = office.send_away()
    office.tell({copy: (2, NONE)})
    office.controller.books.fetch(one, [office.pool.give(3)], 0, 10)
    orders = office.controller.take_orders(is_idle=True)
    (transfer,) = orders.transfers
    assert transfer.kind is TransferKind.SWAP_IN
    assert orders == StepOrders((transfer,), is_idle=True)
    assert office.controller.books.find_owner(f"{COPY}{transfer.transfer_id}") == one.request.request_id
    office.tell({transfer.transfer_id: (1, frozenset({place}))})
    assert office.controller.books.transfers.count_blocks(Tier.HOST, Direction.INBOUND) == 3
    office.tell({transfer.transfer_id: (1, NONE)})
    assert office.controller.books.count_restorable(one) == num_left
    assert office.controller.books.num_resumed == 0
    assert office.controller.books.backups.slots[Tier.HOST].num_taken == num_left // BLOCK_TOKENS


@given(data=st.data(), num_workers=st.integers(1, 4), num_copies=st.integers(1, 4))
def test_whatever_the_order_every_copy_is_settled_with_its_last_worker(
    data: st.DataObject, num_workers: int, num_copies: int
) -> None:
    office = Office(num_workers)
    copies = {copy: one for one, _, copy in (office.send_away() for _ in range(num_copies))}
    words = data.draw(st.permutations([copy for copy in copies for _ in range(num_workers)]))
    losses: dict[int, list[frozenset[int]]] = {copy: [] for copy in copies}
    while words:
        num_now = data.draw(st.integers(1, len(words)))
        report = WorkerReport()
        for copy in words[:num_now]:
            losses[copy].append(data.draw(st.frozensets(st.integers(0, 2), max_size=1)))
            report = report.merge(WorkerReport({copy: (1, losses[copy][-1])}))
        office.controller.note_report(report)
        words = words[num_now:]
        assert len(office.controller.books.transfers) == sum(len(said) < num_workers for said in losses.values())
    for copy, one in copies.items():
        lost = NONE.union(*losses[copy])
        assert office.controller.books.count_restorable(one) == (BLOCK_TOKENS * min(lost) if lost else 10)


def test_orders_are_given_once() -> None:
    office = Office(num_workers=2)
    office.send_away()
    assert office.controller.take_orders(is_idle=False) == StepOrders()
    assert office.controller.take_orders(is_idle=True) == StepOrders(is_idle=True)
    office.controller.is_computing = True
    assert not office.controller.take_orders(is_idle=True).is_idle, "tokens of an outstanding step wait for no copy"


def test_slots_are_whole_blocks_of_what_was_given() -> None:
    assert Office(num_workers=1, num_slots=5).controller.books.backups.num_available(Tier.HOST) == 5
    office = Office(num_workers=1, num_slots=0)
    one = office.arrive()
    assert not office.controller.books.swap_out(one, [office.pool.give(1)], 3, Reason.SLICE_ENDED)
    assert (office.controller.books.num_refused, len(office.controller.books.transfers)) == (1, 0)


def test_links_learn_from_every_worker() -> None:
    office = Office(num_workers=2)
    assert office.controller.links[Tier.HOST].bandwidth == FIRST_BANDWIDTH
    for _ in range(20):
        slow = CopyTime(Tier.HOST, Direction.OUTBOUND, 1, 10, 100 * 10 * BLOCK_BYTES / FIRST_BANDWIDTH)
        office.controller.note_report(WorkerReport(copy_times=(slow, slow)))
    assert office.controller.links[Tier.HOST].bandwidth < FIRST_BANDWIDTH


def test_watchers_get_every_decision() -> None:
    controller = Office(num_workers=1).controller
    told: list[tuple[View, float, Decision]] = []
    controller.watchers.append(lambda view, now, decision: told.append((view, now, decision)))
    view, decision = cast(View, SimpleNamespace(swapped=())), Decision()
    controller.record(view, 7.5, decision)
    assert told == [(view, 7.5, decision)]


def test_gauges_are_of_the_last_decision_and_of_all_workers() -> None:
    office = Office(num_workers=2)
    office.send_away()
    office.controller.record(cast(View, SimpleNamespace(swapped=(1,))), 0.0, Decision())
    expected = {"requests_swapped": 1, "kv_bytes host": 3 * 2 * BLOCK_BYTES}
    assert office.controller.tally.take() == {"counts": {}, "gauges": expected}
