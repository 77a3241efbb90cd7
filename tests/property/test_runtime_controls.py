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
from tests.support.controls import Broken, Controls, Fault
from tests.support.loops import FakeExecutor
from tests.support.stories import make_story_loop, tell


def tell_many(num_stories: int) -> None:
    for seed in range(num_stories):
        tell(make_story_loop(seed, depth=1 + seed % 2, num_slots=[40, 6, 0][seed % 3], caches=seed % 4 > 0), seed)


def test_the_stories_end_well() -> None:
    tell_many(30)


# -- the ledger ------------------------------------------------------------------------------------------------------


CONTROLS = Controls()


@CONTROLS.patches()
def a_ledger_that_forgets_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockLedger, "pin", lambda self, blocks: None)
    monkeypatch.setattr(BlockLedger, "unpin", lambda self, blocks: None)


@CONTROLS.breaks(BlockLedger, "allocate")
def a_ledger_that_gives_a_block_twice(allocate: Broken, self: BlockLedger, num_blocks: int) -> list[BlockId] | None:
    blocks = allocate(self, num_blocks)
    return [blocks[0]] * num_blocks if blocks else blocks


@CONTROLS.breaks(Loop, "_seal")
def a_loop_that_seals_blocks_before_they_are_full(_: Broken, self: Loop, seq: Sequence) -> None:
    block_tokens = self.state.ledger.block_tokens
    keys = seq.keys_for(min(len(seq.blocks), len(seq.tokens) // block_tokens), block_tokens)
    for index in range(seq.num_sealed, len(keys)):
        self.state.ledger.seal(seq.blocks[index], keys[index])
    seq.num_sealed = len(keys)


# -- copies ----------------------------------------------------------------------------------------------------------


@CONTROLS.breaks(FakeExecutor, "copy")
def an_executor_that_corrupts_a_slot(copy: Broken, self: FakeExecutor, transfer: Transfer, lost: Seq[int] = ()) -> None:
    copy(self, transfer, lost)
    if transfer.kind is not TransferKind.SWAP_IN:
        location = transfer.locations[0]
        self.slots[location.tier, location.slot] = dict.fromkeys(range(self.block_tokens), (-1, -1))


@CONTROLS.breaks(FakeExecutor, "copy")
def an_executor_that_mixes_up_two_slots(copy: Broken, self: FakeExecutor, t: Transfer, lost: Seq[int] = ()) -> None:
    is_back = t.kind is TransferKind.SWAP_IN
    copy(self, replace(t, locations=t.locations[::-1]) if is_back else t, lost)


def _ends_with(is_inbound: bool, change: Callable[[Seq[int]], Seq[int]]) -> Broken:
    """Settle transfers of one direction as if other blocks had been lost."""

    def transfer_done(done: Broken, self: Loop, transfer_id: int, lost: Seq[int], now: float) -> None:
        is_changed = self.state.transfers[transfer_id].is_inbound is is_inbound
        done(self, transfer_id, change(lost) if is_changed else lost, now)

    return transfer_done


CONTROLS.add("a_loop_that_commits_failed_backups", Loop, "transfer_done", _ends_with(False, lambda lost: ()))
CONTROLS.add("a_loop_that_believes_a_failed_restore", Loop, "transfer_done", _ends_with(True, lambda lost: ()))


# It leaves out only the last block, if that is lost.
CONTROLS.add(
    "a_loop_that_keeps_what_follows_a_lost_block",
    Arrival,
    "count_leading",
    lambda _, move, lost: len(move.table) - (len(move.table) - 1 in lost),
)


# It drops the right number of backups, but the wrong ones.
WRONG_ONES = _ends_with(False, lambda lost: range(len(lost)))
CONTROLS.add("a_loop_that_forgets_which_block_was_lost", Loop, "transfer_done", WRONG_ONES)
CONTROLS.add("a_loop_that_keeps_an_old_tail", Swaps, "_tail_key", lambda _, self, seq: seq.root)
# -- steps -----------------------------------------------------------------------------------------------------------


@CONTROLS.breaks(LoopState, "enter")
def a_loop_that_frees_blocks_under_a_step(release: Broken, self: LoopState, seq: Sequence, status: object) -> None:
    release(self, seq, status)  # type: ignore[arg-type]
    if getattr(status, "value", "") == "finished" and seq.num_outstanding:
        self.free_blocks(seq)


CONTROLS.add("a_loop_that_forgets_stale_tables", PlanBuilder, "_send_table", lambda _, self, seq_id: None)
CONTROLS.add(
    "a_loop_that_forgets_loading_requests_when_blocks_move", Swaps, "remap_blocks", lambda _, self, moved: None
)
CONTROLS.add("a_loop_that_loses_what_a_postponed_plan_said", Loop, "_postpone", lambda _, self, plan: None)


@CONTROLS.breaks(FakeExecutor, "execute")
def a_loop_that_delivers_tokens_after_the_end(execute: Broken, self: FakeExecutor, plan: StepPlan) -> object:
    result = execute(self, plan)
    return replace(result, token_ids=list(reversed(result.token_ids)))


@pytest.mark.parametrize("fault", CONTROLS)
def test_the_stories_notice(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, InvariantError, KeyError, IndexError)):
        tell_many(150)
