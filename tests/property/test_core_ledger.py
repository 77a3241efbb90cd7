"""The block ledger against an independent model: plain sets, lists and dicts, and readable bytes.

Laws: every block is exactly one of absent, free, owned, cached, loading, draining; refcounts equal references; blocks
in a table or the index hold their bytes, also after a shrink moved them; the least recently used prefix is evicted
first; the fullest quantum is filled first; after a shrink, u used blocks are in the fewest quanta that can hold them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from floodplain.core import shrink as shrinking
from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId, FreeBlocks
from floodplain.core.hashing import BlockKey
from tests.support.examples import examples
from tests.support.ledger_machine import LedgerMachine

PROBLEMS = (AssertionError, InvariantError, KeyError, IndexError)

LedgerMachine.TestCase.settings = settings(
    max_examples=examples(40), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLedgerMachine = LedgerMachine.TestCase


def tour(machine: LedgerMachine) -> None:
    """Every case of the ledger once, by the machine's own rules, with its laws checked after each."""

    def do(name: str, *args: object) -> None:
        getattr(machine, name)(*args)
        machine.ledger_agrees_with_the_model()
        machine.everything_readable_holds_its_bytes()

    a, b, c, d = (BlockKey(bytes([n])) for n in range(4))
    machine.begin(12, 4, True)
    do("allocate", 5)  # table 0, over two quanta
    for position, key in enumerate([a, b, c, d]):
        do("seal", 0, position, key)
    do("share", a)  # table 1
    do("share", b)  # table 2
    do("free", 0)  # c and d are cached, d is older
    do("allocate", 4)  # now table 2
    do("pin", 2)
    do("free", 2)  # drains
    do("shrink", 0, True)
    do("unpin", 0)
    do("grow", 0, 12)
    do("allocate", 5)
    do("pin", 0)
    do("shrink", 0, True)  # the pinned block stays
    do("unpin", 0)
    do("grow", 0, 12)
    do("begin_load", 2)
    do("end_load", 0, True)
    do("begin_load", 1)
    do("end_load", 0, False)
    do("free", 2)
    do("shrink", 0, False)
    do("shrink", 0, True)  # two blocks move
    do("grow", 0, 12)
    do("allocate", 2)  # into a quantum of their own, since the first is full
    do("free", 2)
    do("free", 1)
    do("pin", 0)
    do("shrink", 0, False)  # a is alone in the first quantum, but a copy reads it
    do("unpin", 0)
    do("shrink", 0, True)  # a moves, with its key
    do("share", a)
    do("grow", 0, 12)
    do("pass_through", [c, d])
    do("allocate", machine.ledger.num_available - 1)  # d is evicted, c stays
    do("shrink", 0, True)
    do("share", c)


def test_a_tour_of_every_corner() -> None:
    tour(LedgerMachine())


# -- negative controls: the machine finds a ledger with one subtle fault ---------------------------------------------


def forgets_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockLedger, "pin", lambda self, blocks: None)
    monkeypatch.setattr(BlockLedger, "unpin", lambda self, blocks: None)


def evicts_the_most_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    evict = BlockLedger._evict
    monkeypatch.setattr(BlockLedger, "_evict", lambda self, block: evict(self, next(reversed(self._cached))))


def fills_the_emptiest_quantum(monkeypatch: pytest.MonkeyPatch) -> None:
    def pop(self: FreeBlocks) -> BlockId:
        if self._untouched:
            self._touch_next()
        fullest = max(self._by_quantum.values(), key=len)
        block = next(iter(fullest))
        self.remove(block)
        return block

    monkeypatch.setattr(FreeBlocks, "pop", pop)


def forgets_the_key_of_a_moved_block(monkeypatch: pytest.MonkeyPatch) -> None:
    move = BlockLedger.move

    def forgetful(self: BlockLedger, source: BlockId, destination: BlockId) -> None:
        self._forget_key(source)
        move(self, source, destination)

    monkeypatch.setattr(BlockLedger, "move", forgetful)


def keeps_evicted_content_findable(monkeypatch: pytest.MonkeyPatch) -> None:
    evict_well = BlockLedger._evict

    def evict(self: BlockLedger, block: BlockId) -> None:
        key = self._keys[block]
        evict_well(self, block)
        self._index[key] = block

    monkeypatch.setattr(BlockLedger, "_evict", evict)


def shares_without_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    share = BlockLedger.share

    def uncounted(self: BlockLedger, key: BlockKey) -> BlockId | None:
        block = share(self, key)
        if block is not None and self._refcounts[block] > 1:
            self._refcounts[block] -= 1
        return block

    monkeypatch.setattr(BlockLedger, "share", uncounted)


def keeps_a_quantum_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = shrinking._choose_kept
    monkeypatch.setattr(shrinking, "_choose_kept", lambda quanta, wanted: choose(quanta, wanted + 1))


def moves_what_a_copy_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    survey = BlockLedger.survey

    def blind(self: BlockLedger, first: int, num_blocks: int) -> tuple[int, int, bool]:
        pins, self._pins = self._pins, {}
        try:
            return survey(self, first, num_blocks)
        finally:
            self._pins = pins

    monkeypatch.setattr(BlockLedger, "survey", blind)


def swaps_two_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = shrinking.commit_shrink

    def crossed(ledger: BlockLedger, plan: shrinking.ShrinkPlan) -> dict[BlockId, BlockId]:
        moved = commit(ledger, plan)
        return dict(zip(moved, reversed(moved.values()), strict=True))

    monkeypatch.setattr(shrinking, "commit_shrink", crossed)


@pytest.mark.parametrize(
    "mutate",
    [
        forgets_pins,
        evicts_the_most_recent,
        fills_the_emptiest_quantum,
        forgets_the_key_of_a_moved_block,
        keeps_evicted_content_findable,
        shares_without_counting,
        keeps_a_quantum_too_many,
        moves_what_a_copy_reads,
        swaps_two_moves,
    ],
)
def test_the_machine_notices_a_ledger_that(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(PROBLEMS):
        tour(LedgerMachine())
