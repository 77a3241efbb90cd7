"""Rows of sequences: more are made if needed, and every sequence keeps its row and state."""

from __future__ import annotations

from floodplain.core.free_blocks import BlockId
from floodplain.core.plan import TableUpdate
from floodplain.core.request import SeqId
from floodplain.engine.batches import SequenceSlots


def table(number: int) -> TableUpdate:
    return TableUpdate(SeqId(number), 0, (BlockId(number), BlockId(number + 1)))


def test_every_sequence_keeps_its_table_however_many_come() -> None:
    slots = SequenceSlots(max_blocks=4, num_rows=2)
    for number in range(9):
        slots.update_table(table(number))
    rows = slots.rows([SeqId(number) for number in range(9)])
    assert len(set(rows.tolist())) == 9
    assert slots.tables[rows, :2].tolist() == [[number, number + 1] for number in range(9)]


def test_a_row_is_given_again_when_its_sequence_is_gone() -> None:
    slots = SequenceSlots(max_blocks=4, num_rows=2)
    for number in range(50):
        slots.update_table(table(number))
        slots.release(SeqId(number))
    assert len(slots.tables) == 2
