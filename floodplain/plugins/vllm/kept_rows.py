"""Rows of earlier steps that are still valid: a row is made anew only if something that it states changed.

The row of a decoding request (``core.view``) is valid while the request gets a token in every step, and its table, its
backups and its exclusive blocks are the same.
"""

from __future__ import annotations

from collections.abc import Set
from operator import attrgetter
from typing import Any

from floodplain.core.request import SeqId
from floodplain.core.view import SequenceView
from floodplain.plugins.vllm.rows import RowMaker
from floodplain.plugins.vllm.tracked import TrackedRequest

_Mark = tuple[int, int, int, int, int, int]


class KeptRows:
    """Rows of running requests, and of requests that hold no blocks.

    ``running_ids``: requests of the last call of ``running``.
    """

    def __init__(self) -> None:
        self.running_ids: Set[SeqId] = frozenset()
        self._ones: tuple[TrackedRequest, ...] = ()  # of the last call of ``running``, as they came
        self._sorted: list[TrackedRequest] = []  # the same by their keys; the next two are in this order
        self._rows: list[SequenceView] = []
        self._leads: list[int | None] = []  # the values of _lead
        self._absent: dict[SeqId, tuple[_Mark, SequenceView]] = {}

    def drop(self, seq_ids: Set[SeqId]) -> None:
        """Invalidate the rows of these requests, although the requests themselves are unchanged."""
        if not seq_ids:
            return
        pairs = zip(self._sorted, self._leads, strict=True)
        self._leads = [None if one.seq_id in seq_ids else lead for one, lead in pairs]
        for seq_id in seq_ids & self._absent.keys():
            del self._absent[seq_id]

    def running(self, ones: tuple[TrackedRequest, ...], make: RowMaker, step: int) -> tuple[SequenceView, ...]:
        """Return rows of all requests that hold their blocks and compute, in order of their keys."""
        if ones != self._ones:
            self._seat(ones)
        # A table grows with the step that is due to need a block, and in no other. This runs for every request in
        # every step: a call for each would cost as much again.
        stale = [
            place
            for place, (one, row, lead) in enumerate(zip(self._sorted, self._rows, self._leads, strict=True))
            if one.request.num_computed_tokens - step != lead
            or one.request.num_output_placeholders > 1
            or row.block_due_step < step
            or one.entered_step != row.entered_step
            or len(one.backups) != row.num_backed_blocks
        ]
        for place in stale:
            one = self._sorted[place]
            row = self._rows[place] = make.running(one)
            self._leads[place] = _lead(one, row)
        return tuple(self._rows)

    def _seat(self, ones: tuple[TrackedRequest, ...]) -> None:
        """Replace the running requests; those that go on keep their rows."""
        known = {one.seq_id: kept for one, *kept in zip(self._sorted, self._rows, self._leads, strict=True)}
        nothing: list[Any] = [None, None]
        self._ones, self._sorted = ones, sorted(ones, key=attrgetter("order_key"))
        kept = [known.get(one.seq_id, nothing) for one in self._sorted]
        self._rows, self._leads = [row for row, _ in kept], [lead for _, lead in kept]
        self.running_ids = frozenset([one.seq_id for one in ones])

    def absent(self, one: TrackedRequest, make: RowMaker) -> SequenceView:
        """Return the row of a request that holds no blocks.

        A copy of it becomes whole when its blocks stop leaving, and a lost one is dropped at once.
        """
        mark = (
            one.request.num_tokens, len(one.backups), len(one.rest), one.num_kept_tokens, one.num_leaving,
            one.entered_step,
        )  # fmt: skip
        kept = self._absent.get(one.seq_id)
        if kept is None or kept[0] != mark:
            kept = self._absent[one.seq_id] = (mark, make.absent(one))
        return kept[1]

    def keep_only(self, absent: Set[SeqId]) -> None:
        """Drop the rows of all absent requests but these."""
        for seq_id in self._absent.keys() - absent:
            del self._absent[seq_id]


def _lead(one: TrackedRequest, row: SequenceView) -> int | None:
    """Return computed tokens less the step: constant while a decoding request gets a token in every step.

    None: the row must be made anew in the next step, because its request does not decode yet, is about to get its first
    token, or has drafts outstanding: the row counts their slots as taken, and those of rejected drafts are free again.
    """
    is_steady = row.is_decoding and row.first_token_s is not None and not one.num_unverified_tokens
    return row.num_scheduled - row.since_step if is_steady else None
