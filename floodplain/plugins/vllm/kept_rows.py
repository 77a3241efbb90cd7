"""Rows of earlier steps that still hold: made anew only where something changed that they say.

A decoding row says from which step on it needs a block or has nothing to run (``core.view``). So it holds as long as
its request gets a token in every step, and its table, its backups and its exclusive blocks are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from floodplain.core.backups import Backup
from floodplain.core.request import SeqId
from floodplain.core.view import SequenceView
from floodplain.plugins.vllm.prefix_watch import Found
from floodplain.plugins.vllm.rows import Blocks, RowMaker, sort_rows
from floodplain.plugins.vllm.tracked import TrackedRequest


@dataclass(frozen=True, slots=True)
class _Absent:
    """A row, and what it was made of."""

    row: SequenceView
    found: Found
    num_tokens: int
    num_backups: int
    tail: tuple[Backup, int] | None
    num_leaving: int


class KeptRows:
    """Rows of requests that run, and of those that hold no blocks.

    Args:
        blocks: Of the engine.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._running: dict[SeqId, SequenceView] = {}
        self._last: list[SequenceView] = []
        self._sorted: tuple[SequenceView, ...] = ()
        self._absent: dict[SeqId, _Absent] = {}

    def running(self, ones: Iterable[TrackedRequest], make: RowMaker, step: int) -> tuple[SequenceView, ...]:
        """Rows of all requests that hold their blocks and compute, in order of their keys."""
        kept, rows = self._running, []
        for seq_id in self._blocks.take_recounted():
            kept.pop(seq_id, None)
        for one in ones:
            row = kept.get(one.seq_id)
            rows.append(row if row is not None and _holds(row, one, step) else make.running(one))
        if rows != self._last:  # rows that were kept are the same objects, so that this is quick
            self._running = {row.seq_id: row for row in rows}
            self._last, self._sorted = rows, sort_rows(rows)
        return self._sorted

    def absent(self, one: TrackedRequest, make: RowMaker) -> SequenceView:
        """The row of a request that holds no blocks.

        A copy of it becomes whole when its blocks stop leaving, and one that is lost is dropped at once.
        """
        found, num_tokens, kept = make.find_prefix(one), one.request.num_tokens, self._absent.get(one.seq_id)
        if (
            kept is None
            or kept.found is not found
            or kept.num_tokens != num_tokens
            or kept.num_backups != len(one.backups)
            or kept.tail is not one.tail
            or kept.num_leaving != one.num_leaving
            or kept.row.entered_step != one.entered_step
        ):
            row = make.absent(one)
            kept = _Absent(row, found, num_tokens, len(one.backups), one.tail, one.num_leaving)
            self._absent[one.seq_id] = kept
        return kept.row

    def keep_only(self, absent: Set[SeqId]) -> None:
        """No other request will be asked for with ``absent`` soon."""
        for seq_id in self._absent.keys() - absent:
            del self._absent[seq_id]


def _holds(row: SequenceView, one: TrackedRequest, step: int) -> bool:
    """Whether the row of a running request says what one that is made now would.

    Its table grows with the step that is due to need a block, and in no other.
    """
    request, num_passed = one.request, step - row.since_step
    return (
        row.is_decoding
        and step <= row.block_due_step
        and row.num_scheduled + num_passed == request.num_computed_tokens
        and row.num_tokens + num_passed == one.num_expected_tokens
        and row.num_backed_blocks == len(one.backups)
        and row.entered_step == one.entered_step
        and row.first_token_s == one.first_token_s
    )
