"""Drives a loop and a fake executor by hand: plan, complete, settle, each as late as the test chooses."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from random import Random

from floodplain.core.blocks import BlockState
from floodplain.core.free_blocks import BlockId
from floodplain.core.plan import Decision, StepOutputs, StepPlan, StepResult, Transfer, Wait
from floodplain.core.request import FinishReason, OrderKey, Request, SeqId
from floodplain.core.sequence import Sequence
from floodplain.core.shrink import commit_shrink, plan_shrink
from floodplain.core.view import View
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.runtime.loop import Loop
from tests.support.loops import FakeExecutor, make_request, reference_output

Choice = Callable[[View], Decision]


class ScriptedPolicy:
    """Decides by ``script``, one choice per decision; as FCFS when the script is at its end."""

    name = "scripted"
    waiting_window, num_newest = 16, 0
    keeps_goals = False
    chooses_admissions = False

    def __init__(self, script: Iterable[Choice] = ()) -> None:
        self.script = deque(script)
        self.views: list[View] = []

    def waiting_key(self, seq: Sequence) -> OrderKey:
        return seq.order_key

    def decide(self, view: View, now: float, rng: Random) -> Decision:
        self.views.append(view)
        return self.script.popleft()(view) if self.script else FcfsPolicy().decide(view, now, rng)


class Driver:
    """A loop, its executor and its outputs; the loop's laws are checked after every call."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.executor = FakeExecutor(loop.state.ledger.block_tokens)
        self.now = 0.0
        self.pending: deque[StepResult] = deque()
        self.requests: dict[SeqId, Request] = {}
        self.outputs: dict[SeqId, list[int]] = {}
        self.finished: dict[SeqId, FinishReason] = {}

    def tick(self) -> float:
        self.loop.check_integrity()
        self.now += 1.0
        return self.now

    def submit(self, prompt: Iterable[int], **params: object) -> SeqId:
        return self.submit_request(make_request("r", tuple(prompt), self.tick(), **params))

    def submit_request(self, request: Request) -> SeqId:
        seq_id = self.loop.submit(request)
        self.requests[seq_id] = request
        self.outputs[seq_id] = []
        return seq_id

    def plan(self) -> StepPlan | Wait:
        """Plan a step and execute it; its result waits for ``complete``."""
        plan = self.loop.next_plan(self.tick())
        if isinstance(plan, StepPlan):
            self.pending.append(self.executor.execute(plan))
        return plan

    def complete(self) -> StepOutputs:
        outputs = self.loop.complete(self.pending.popleft(), self.tick())
        for seq_id, token in zip(outputs.seq_ids, outputs.token_ids, strict=True):
            self.outputs[seq_id].append(token)
        self.finished |= outputs.finished
        self.loop.check_integrity()
        return outputs

    def step(self) -> StepPlan:
        """Plan and complete one step."""
        plan = self.plan()
        assert isinstance(plan, StepPlan), "nothing to run"
        self.complete()
        return plan

    def settle(self, ok: bool = True, lost: Seq[int] = ()) -> Transfer:
        """End the oldest transfer; blocks at the places ``lost`` are not copied, and none is if it fails."""
        transfer = self.executor.transfers.pop(0)
        lost = lost if ok else range(len(transfer.blocks))
        self.executor.copy(transfer, lost)
        self.loop.transfer_done(transfer.transfer_id, lost, self.tick())
        self.loop.check_integrity()
        return transfer

    def shrink(self, target_blocks: int = 0) -> dict[BlockId, BlockId]:
        """Shrink the pool at a boundary: bytes, ledger and block tables follow."""
        plan = plan_shrink(self.loop.state.ledger, target_blocks)
        for source, destination in plan.moves:
            self.executor.blocks[destination] = dict(self.executor.blocks.pop(source, {}))
        moved = commit_shrink(self.loop.state.ledger, plan)
        self.loop.remap_blocks(moved)
        self.loop.check_integrity()
        return moved

    def grow_back(self) -> None:
        """Grow the pool to its original size."""
        ledger = self.loop.state.ledger
        everything = range(ledger.num_indexed_blocks)
        ledger.add_memory([b for b in everything if ledger.state(BlockId(b)) is BlockState.ABSENT])

    def evict_everything(self) -> None:
        """Allocate and free all available blocks: cached blocks are evicted."""
        blocks = self.loop.state.ledger.allocate(self.loop.state.ledger.num_available)
        assert blocks is not None
        self.loop.state.ledger.free(blocks)

    def run(self, max_steps: int = 1000) -> list[StepPlan]:
        """Run until everything has ended, as deep as the loop allows."""
        plans: list[StepPlan] = []
        while self.loop.has_unfinished:
            assert len(plans) < max_steps, "the loop does not come to rest"
            while self.executor.transfers:
                self.settle()
            plan = self.plan()
            if isinstance(plan, StepPlan):
                plans.append(plan)
            elif self.pending:
                self.complete()
            else:
                assert self.executor.transfers or not self.loop.has_unfinished, "the loop waits for nothing"
        self.check_at_rest()
        return plans

    def check_at_rest(self) -> None:
        """All blocks and slots are released, and every output is that of an undisturbed run."""
        self.loop.check_integrity()
        ledger = self.loop.state.ledger
        assert ledger.num_available == ledger.num_blocks
        assert self.loop.state.backups.is_at_rest
        for seq_id, reason in self.finished.items():
            if reason is not FinishReason.ABORT:
                assert self.outputs[seq_id] == self.reference(seq_id)

    def reference(self, seq_id: SeqId) -> list[int]:
        """Return the tokens that the request must produce."""
        return reference_output(self.requests[seq_id], self.loop.state.config.max_model_len)

    def seq(self, seq_id: SeqId) -> Sequence:
        """Return the loop's own object for a live request."""
        return self.loop.state.sequences[seq_id]


def computed(plan: StepPlan) -> dict[SeqId, int]:
    """Return the number of tokens of each sequence that a step computes."""
    return dict.fromkeys(plan.decodes, 1) | {chunk.seq_id: len(chunk.token_ids) for chunk in plan.prefills}
