"""Negative controls of the loop's laws: random stories find a component with one subtle fault."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.plan import StepPlan, Transfer, TransferKind
from floodplain.core.sequence import Sequence
from floodplain.runtime.apply import PlanBuilder
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import Arrival, LoopState
from floodplain.runtime.swaps import Swaps
from tests.support.loops import FakeExecutor
from tests.support.stories import make_story_loop, tell

Mutation = Callable[[pytest.MonkeyPatch], None]


def tell_many(num_stories: int) -> None:
    for seed in range(num_stories):
        tell(make_story_loop(seed, depth=1 + seed % 2, num_slots=[40, 6, 0][seed % 3], caches=seed % 4 > 0), seed)


def test_the_stories_end_well() -> None:
    tell_many(30)


# -- the ledger ------------------------------------------------------------------------------------------------------


def a_ledger_that_forgets_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockLedger, "pin", lambda self, blocks: None)
    monkeypatch.setattr(BlockLedger, "unpin", lambda self, blocks: None)


def a_ledger_that_gives_a_block_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = BlockLedger.allocate

    def doubled(self: BlockLedger, num_blocks: int) -> list[BlockId] | None:
        blocks = allocate(self, num_blocks)
        return [blocks[0]] * num_blocks if blocks else blocks

    monkeypatch.setattr(BlockLedger, "allocate", doubled)


def a_loop_that_seals_blocks_before_they_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def seal(self: Loop, seq: Sequence) -> None:
        block_tokens = self.state.ledger.block_tokens
        keys = seq.keys_for(min(len(seq.blocks), len(seq.tokens) // block_tokens), block_tokens)
        for index in range(seq.num_sealed, len(keys)):
            self.state.ledger.seal(seq.blocks[index], keys[index])
        seq.num_sealed = len(keys)

    monkeypatch.setattr(Loop, "_seal", seal)


# -- copies ----------------------------------------------------------------------------------------------------------


def an_executor_that_corrupts_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = FakeExecutor.copy

    def corrupt(self: FakeExecutor, transfer: Transfer, lost: Seq[int] = ()) -> None:
        copy(self, transfer, lost)
        if transfer.kind is not TransferKind.SWAP_IN:
            location = transfer.locations[0]
            self.slots[location.tier, location.slot] = dict.fromkeys(range(self.block_tokens), (-1, -1))

    monkeypatch.setattr(FakeExecutor, "copy", corrupt)


def an_executor_that_mixes_up_two_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = FakeExecutor.copy
    monkeypatch.setattr(
        FakeExecutor, "copy", lambda self, t, lost=(): copy(self, replace(t, locations=t.locations[::-1]), lost)
        if t.kind is TransferKind.SWAP_IN else copy(self, t, lost)
    )  # fmt: skip


def _ends_with(monkeypatch: pytest.MonkeyPatch, is_inbound: bool, change: Callable[[Seq[int]], Seq[int]]) -> None:
    """Settle transfers of one direction as if other blocks had been lost."""
    done = Loop.transfer_done

    def transfer_done(self: Loop, transfer_id: int, lost: Seq[int], now: float) -> None:
        is_changed = self.state.transfers[transfer_id].is_inbound is is_inbound
        done(self, transfer_id, change(lost) if is_changed else lost, now)

    monkeypatch.setattr(Loop, "transfer_done", transfer_done)


def a_loop_that_commits_failed_backups(monkeypatch: pytest.MonkeyPatch) -> None:
    _ends_with(monkeypatch, False, lambda lost: ())


def a_loop_that_believes_a_failed_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    _ends_with(monkeypatch, True, lambda lost: ())


def a_loop_that_keeps_what_follows_a_lost_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves out only the last block, if that is lost."""
    monkeypatch.setattr(Arrival, "count_leading", lambda move, lost: len(move.table) - (len(move.table) - 1 in lost))


def a_loop_that_forgets_which_block_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It drops the right number of backups, but the wrong ones."""
    _ends_with(monkeypatch, False, lambda lost: range(len(lost)))


def a_loop_that_keeps_an_old_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Swaps, "_tail_key", lambda self, seq: seq.root)


# -- steps -----------------------------------------------------------------------------------------------------------


def a_loop_that_frees_blocks_under_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    release = LoopState.enter

    def enter(self: LoopState, seq: Sequence, status: object) -> None:
        release(self, seq, status)  # type: ignore[arg-type]
        if getattr(status, "value", "") == "finished" and seq.num_outstanding:
            self.free_blocks(seq)

    monkeypatch.setattr(LoopState, "enter", enter)


def a_loop_that_forgets_stale_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlanBuilder, "_send_table", lambda self, seq_id: None)


def a_loop_that_forgets_loading_requests_when_blocks_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Swaps, "remap_blocks", lambda self, moved: None)


def a_loop_that_loses_what_a_postponed_plan_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "_postpone", lambda self, plan: None)


def a_loop_that_delivers_tokens_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def shift(self: FakeExecutor, plan: StepPlan) -> object:
        result = execute(self, plan)
        return replace(result, token_ids=list(reversed(result.token_ids)))

    execute = FakeExecutor.execute
    monkeypatch.setattr(FakeExecutor, "execute", shift)


@pytest.mark.parametrize(
    "mutate",
    [
        a_ledger_that_forgets_pins,
        a_ledger_that_gives_a_block_twice,
        a_loop_that_seals_blocks_before_they_are_full,
        an_executor_that_corrupts_a_slot,
        an_executor_that_mixes_up_two_slots,
        a_loop_that_commits_failed_backups,
        a_loop_that_believes_a_failed_restore,
        a_loop_that_keeps_what_follows_a_lost_block,
        a_loop_that_forgets_which_block_was_lost,
        a_loop_that_keeps_an_old_tail,
        a_loop_that_frees_blocks_under_a_step,
        a_loop_that_forgets_stale_tables,
        a_loop_that_forgets_loading_requests_when_blocks_move,
        a_loop_that_loses_what_a_postponed_plan_said,
        a_loop_that_delivers_tokens_after_the_end,
    ],
)
def test_the_stories_notice(mutate: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, InvariantError, KeyError, IndexError)):
        tell_many(150)
