"""Views are incremental, and runs are reproducible.

Laws: a view carried over from step to step equals one built anew; two loops with the same seed and events issue the
same plans.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core import changes
from floodplain.core.backups import Backup, BackupTable
from floodplain.core.blocks import BlockLedger
from floodplain.core.changes import ChangeLog
from floodplain.core.errors import InvariantError
from floodplain.core.plan import StepPlan
from floodplain.core.sequence import Sequence
from floodplain.core.view import SequenceView, View
from floodplain.runtime.apply import PlanBuilder
from floodplain.runtime.state import LoopState
from floodplain.runtime.view import ViewBuilder
from tests.support.controls import Broken, Controls, Fault
from tests.support.examples import examples
from tests.support.loops import RandomPolicy
from tests.support.stories import make_story_loop, tell


def at_step(row: SequenceView, step: int) -> tuple[object, ...]:
    """Return the content of a row when step ``step`` is planned: one row serves for many steps."""
    grown = step - row.since_step if row.is_decoding else 0
    return (
        row.seq_id,
        row.status,
        row.order_key,
        row.num_prompt,
        row.num_tokens + grown,
        row.num_scheduled + grown,
        row.num_blocks,
        row.exclusive_blocks,
        row.is_decoding,
        row.block_due_step,
        row.end_step,
        row.num_cached_tokens,
        row.num_shared_blocks,
        row.num_backed_blocks,
        row.num_restorable_tokens,
        row.entered_step,
        None if row.is_decoding else row.last_token_s,
        row.is_leaving,
        row.next_copy,
        row.is_arriving,
        row.credit,
        row.num_generated(step),
    )


def content_of(view: View) -> list[list[tuple[object, ...]]]:
    groups = (view.running, view.waiting, view.swapped, view.loading)
    return [[at_step(row, view.step) for row in rows] for rows in groups]


class CheckedViews:
    """Builds every view anew and incrementally, and some views by a second builder that reads at other times."""

    def __init__(self, state: LoopState) -> None:
        self._state = state
        self._dice = Random(0)
        self.inner, self.other = ViewBuilder(state), ViewBuilder(state)

    def build(self, step: int, outstanding: Seq[StepPlan]) -> View:
        builders = [self.inner, ViewBuilder(self._state)]
        if self._dice.random() < 0.3:
            builders.insert(self._dice.randrange(3), self.other)
        contents = [content_of(builder.build(step, outstanding)) for builder in builders]
        assert all(content == contents[0] for content in contents)
        return self.inner.build(step, outstanding)


def tell_checked(seed: int, depth: int, num_slots: int, caches: bool) -> None:
    loop = make_story_loop(seed, depth, num_slots, caches)
    loop._views = CheckedViews(loop.state)  # type: ignore[assignment]
    tell(loop, seed)


STORIES = given(
    seed=st.integers(0, 2**32),
    depth=st.sampled_from([1, 2]),
    num_slots=st.sampled_from([0, 6, 40]),
    caches=st.booleans(),
)


@settings(max_examples=examples(30), deadline=None)
@STORIES
def test_a_view_that_was_carried_over_equals_a_new_one(seed: int, depth: int, num_slots: int, caches: bool) -> None:
    tell_checked(seed, depth, num_slots, caches)


@pytest.mark.parametrize("most", [2, 16])
def test_a_view_equals_a_new_one_although_logs_drop_changes(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MOST_CHANGES", most)
    for seed in range(20):
        tell_checked(seed, depth=1 + seed % 2, num_slots=40, caches=True)


@settings(max_examples=examples(15), deadline=None)
@STORIES
def test_the_same_seed_and_events_give_the_same_plans(seed: int, depth: int, num_slots: int, caches: bool) -> None:
    first, second = (tell(make_story_loop(seed, depth, num_slots, caches), seed) for _ in range(2))
    assert first.executor.plans == second.executor.plans
    assert first.finished == second.finished


# -- negative controls -----------------------------------------------------------------------------------------------


CONTROLS = Controls()


@CONTROLS.patches()
def overlooks_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    constant = property(lambda self: 0, lambda self, value: None)
    monkeypatch.setattr(BlockLedger, "sharing_version", constant, raising=False)


CONTROLS.add("overlooks_pauses", PlanBuilder, "_mark_pausing", lambda _, self, num_decodes: None)


@CONTROLS.breaks(LoopState, "keep_backup")
def overlooks_new_backups(_: Broken, self: LoopState, seq: Sequence, backup: Backup) -> None:
    self.backups.keep(backup)
    seq.backups.append(backup)


@CONTROLS.breaks(ViewBuilder, "_running_row")
def keeps_old_counts(make_row: Broken, self: ViewBuilder, seq: Sequence, step: int) -> SequenceView:
    return self._rows.get(seq.seq_id) or make_row(self, seq, step)


@CONTROLS.breaks(BackupTable, "begin_read")
def overlooks_copies_in(begin_read: Broken, self: BackupTable, backups: Iterable[Backup]) -> None:
    log, self.changed_keys = self.changed_keys, ChangeLog()
    begin_read(self, backups)
    self.changed_keys = log


@CONTROLS.breaks(ChangeLog, "since")
def changes_by_reading(since: Broken, self: ChangeLog[object], version: int) -> set[object] | None:
    """The first reader clears the log, as if it were the only one."""
    changed = since(self, version)
    self._num_dropped = self.version
    self._names.clear()
    return changed or set()


@CONTROLS.patches()
def drops_changes_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    since = ChangeLog.since
    monkeypatch.setattr(changes, "MOST_CHANGES", 4)
    monkeypatch.setattr(ChangeLog, "since", lambda self, version: since(self, max(version, self._num_dropped)))


@pytest.mark.parametrize("fault", CONTROLS)
def test_a_view_is_noticed_that(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, InvariantError, KeyError)):
        for seed in range(200):
            tell_checked(seed, depth=2, num_slots=40, caches=True)


def test_a_loop_with_dice_of_its_own_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = Random(1)
    monkeypatch.setattr(RandomPolicy, "_pay", lambda self, slots, tier, num_slots: dice.random() < 0.2)
    first, second = (tell(make_story_loop(1, 1, 40, True), 1) for _ in range(2))
    assert first.executor.plans != second.executor.plans
