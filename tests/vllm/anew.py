"""Rows kept from earlier steps are compared with rows made anew, in each step of a real vLLM."""

from __future__ import annotations

import pytest

from floodplain.core.view import SequenceView
from floodplain.plugins.vllm.kept_rows import KeptRows
from floodplain.plugins.vllm.rows import RowMaker, sort_rows
from floodplain.plugins.vllm.tracked import TrackedRequest
from tests.support.vllm_engine import as_of


def compare_rows(patch: pytest.MonkeyPatch) -> list[int]:
    """Compare rows from now on; the engine must run in this process.

    Returns:
        A list that grows: ages in steps of the compared running rows that are of an earlier step.
    """
    running, absent, ages = KeptRows.running, KeptRows.absent, list[int]()

    def compare_running(
        rows: KeptRows, ones: tuple[TrackedRequest, ...], make: RowMaker, step: int
    ) -> tuple[SequenceView, ...]:
        kept = running(rows, ones, make, step)
        assert as_of(kept, step) == as_of(sort_rows(make.running(one) for one in ones), step)
        tables = {one.seq_id: make._blocks.tables(one.request.request_id) for one in ones}
        counts = [sum(block.ref_cnt == 1 for [table] in [tables[row.seq_id]] for block in table) for row in kept]
        assert [row.exclusive_blocks for row in kept] == counts
        ages.extend(step - row.since_step for row in kept if row.since_step < step)
        return kept

    def compare_absent(rows: KeptRows, one: TrackedRequest, make: RowMaker) -> SequenceView:
        kept = absent(rows, one, make)
        assert as_of([kept], kept.since_step) == as_of([make.absent(one)], kept.since_step)
        return kept

    patch.setattr(KeptRows, "running", compare_running)
    patch.setattr(KeptRows, "absent", compare_absent)
    return ages
