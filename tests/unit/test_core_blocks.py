"""Refusals of the ledgers of blocks, slots and backups; laws: property/test_core_ledger.py, test_core_backups.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from floodplain.core.backups import BackupTable
from floodplain.core.blocks import BlockLedger, BlockState
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId, FreeBlocks
from floodplain.core.hashing import BlockKey
from floodplain.core.tiers import Location, SlotLedger, Tier
from tests.support.line_count import count_lines

A = BlockKey(b"a")


def owned(ledger: BlockLedger, num_blocks: int) -> list[BlockId]:
    blocks = ledger.allocate(num_blocks)
    assert blocks is not None
    return blocks


@pytest.mark.parametrize("kwargs", [{"num_blocks": -1}, {"block_tokens": 0}, {"quantum_blocks": 0}])
def test_an_impossible_pool_is_refused(kwargs: dict[str, int]) -> None:
    with pytest.raises(InvariantError, match="impossible pool"):
        BlockLedger(**{"num_blocks": 1, "block_tokens": 1, **kwargs})


@pytest.mark.parametrize("quantum", [1, 32])
def test_no_line_of_python_runs_for_each_block_of_a_new_pool(quantum: int) -> None:
    """So an event loop is not blocked while it makes a large pool or counts its blocks."""

    def live(num_blocks: int) -> None:
        ledger = BlockLedger(num_blocks, 4, quantum_blocks=quantum)
        ledger.add_memory(range(num_blocks, 2 * num_blocks))
        blocks = owned(ledger, 3)
        ledger.pin(blocks)
        assert ledger.count_states()[BlockState.OWNED] == 3 and ledger.num_available == 2 * num_blocks - 3
        slots = SlotLedger(Tier.HOST, num_blocks)
        assert slots.allocate(3) is not None and slots.num_free == num_blocks - 3

    assert count_lines(lambda: live(64 * 1024)) == count_lines(lambda: live(64)) > 20


@pytest.mark.parametrize("quantum", [1, 3])
def test_a_large_run_of_memory_is_as_many_single_blocks(quantum: int) -> None:
    """The run covers blocks that were retired and blocks that never existed."""
    runs, singles = BlockLedger(7, 4, quantum_blocks=quantum), BlockLedger(0, 4, quantum_blocks=quantum)
    singles.add_memory(list(range(7)))
    for ledger in (runs, singles):
        for block in (4, 5, 6):
            ledger.retire(BlockId(block))
    runs.add_memory(range(4, 17))
    singles.add_memory(list(range(4, 17)))
    given = [sorted(owned(ledger, 17)) for ledger in (runs, singles)]
    assert given[0] == given[1] == list(range(17))
    with pytest.raises(InvariantError, match="some of the blocks 16 to 18 have memory"):
        runs.add_memory(range(16, 19))
    for ledger in (runs, singles):
        ledger.check_integrity([given[0]])
    assert runs.num_blocks == singles.num_blocks == 17


def test_an_empty_pool_gives_nothing() -> None:
    ledger = BlockLedger(0, 4)
    assert ledger.allocate(1) is None
    assert ledger.allocate(0) == []
    with pytest.raises(IndexError):
        FreeBlocks(2).pop()


@pytest.mark.parametrize(
    "misuse",
    [
        lambda ledger, block: ledger.free([block]),
        lambda ledger, block: ledger.seal(block, A),
        lambda ledger, block: ledger.pin([block]),
        lambda ledger, block: ledger.unpin([block]),
        lambda ledger, block: ledger.commit_load([block]),
        lambda ledger, block: ledger.abort_load([block]),
        lambda ledger, block: ledger.add_memory([block]),
        lambda ledger, block: ledger.move(block, block),
    ],
)
def test_what_a_free_block_cannot_do(misuse: Callable[[BlockLedger, BlockId], None]) -> None:
    with pytest.raises(InvariantError):
        misuse(BlockLedger(2, 4), BlockId(0))


@pytest.mark.parametrize(
    "misuse",
    [
        lambda ledger, block: ledger.retire(block),
        lambda ledger, block: ledger.reserve(block),
        lambda ledger, block: ledger.commit_load([block]),
        lambda ledger, block: ledger.move(block, BlockId(1 - block)),
    ],
)
def test_what_an_owned_block_cannot_do(misuse: Callable[[BlockLedger, BlockId], None]) -> None:
    ledger = BlockLedger(2, 4)
    with pytest.raises(InvariantError):
        misuse(ledger, owned(ledger, 1)[0])


def test_a_pinned_block_does_not_move() -> None:
    ledger = BlockLedger(2, 4)
    [block] = owned(ledger, 1)
    ledger.pin([block])
    ledger.reserve(BlockId(1 - block))
    with pytest.raises(InvariantError, match="while a copy reads it"):
        ledger.move(block, BlockId(1 - block))


def test_references_without_a_holder_are_noticed() -> None:
    ledger = BlockLedger(3, 4)
    blocks = owned(ledger, 2)
    ledger.check_integrity([blocks])
    with pytest.raises(InvariantError, match="1 references, 0 held"):
        ledger.check_integrity([])
    with pytest.raises(InvariantError, match="1 references, 2 held"):
        ledger.check_integrity([blocks, blocks])


# -- slots and backups -------------------------------------------------------------------------------------------------


KEY = BlockKey(b"k")


def test_slots_are_given_all_or_none() -> None:
    slots = SlotLedger(Tier.HOST, 3)
    assert slots.allocate(4) is None
    assert slots.num_free == 3
    given = slots.allocate(3)
    assert given is not None and {location.slot for location in given} == {0, 1, 2}
    assert slots.allocate(1) is None
    assert slots.allocate(0) == []


@pytest.mark.parametrize("location", [Location(Tier.HOST, 0), Location(Tier.PEER, 1), Location(Tier.HOST, 9)])
def test_a_slot_that_is_not_taken_cannot_be_freed(location: Location) -> None:
    slots = SlotLedger(Tier.HOST, 2)
    taken = slots.allocate(2)
    assert taken is not None
    slots.free(Location(Tier.HOST, 0))
    with pytest.raises(InvariantError, match="freed but not taken"):
        slots.free(location)


def test_a_lost_slot_breaks_integrity() -> None:
    slots = SlotLedger(Tier.HOST, 2)
    slots.check_integrity()
    slots._fresh = slots._fresh[1:]
    with pytest.raises(InvariantError, match="lost or doubled"):
        slots.check_integrity()


def test_a_tier_that_is_not_there_has_no_room() -> None:
    assert BackupTable().begin_write(Tier.HOST, [KEY]) is None


def test_a_content_is_backed_up_once() -> None:
    table = BackupTable([SlotLedger(Tier.HOST, 4)])
    assert table.begin_write(Tier.HOST, [KEY]) is not None
    with pytest.raises(InvariantError, match="backed up twice"):
        table.begin_write(Tier.HOST, [KEY])


def test_a_backup_is_not_read_before_it_is_whole() -> None:
    table = BackupTable([SlotLedger(Tier.HOST, 4)])
    backups = table.begin_write(Tier.HOST, [KEY])
    assert backups is not None
    with pytest.raises(InvariantError, match="before it is whole"):
        table.begin_read(backups)


def test_releasing_more_often_than_keeping_breaks_integrity() -> None:
    table = BackupTable([SlotLedger(Tier.HOST, 4)])
    backups = table.begin_write(Tier.HOST, [KEY])
    assert backups is not None
    table.release(backups[0])  # the copy is still on its way, so the backup stays
    with pytest.raises(InvariantError, match="released more often"):
        table.check_integrity()
