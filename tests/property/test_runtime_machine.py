"""The loop under any interleaving: steps and copies end in any order, requests arrive, are aborted and stopped.

Laws: every finished request has the reference's tokens, however it was disturbed; the ledgers balance after every rule;
ended requests release everything; time never decreases; the loop always progresses.
"""

from __future__ import annotations

from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from floodplain.core.blocks import BlockState
from floodplain.core.free_blocks import BlockId
from floodplain.core.plan import StepPlan, StepResult
from floodplain.core.request import FinishReason, Request, SeqId
from floodplain.core.shrink import commit_shrink, plan_shrink
from floodplain.policy.base import Policy
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.runtime.sessions import SessionBook
from tests.support.examples import examples
from tests.support.loops import AheadPolicy, FakeExecutor, RandomPolicy, make_loop, make_request, reference_output

MAX_MODEL_LEN = 24


class LoopMachine(RuleBasedStateMachine):
    """Drives a loop and a fake executor with held-back steps and copies."""

    @initialize(
        depth=st.sampled_from([1, 2, 4]),
        policy=st.sampled_from([RandomPolicy, AheadPolicy, FcfsPolicy]),
        num_slots=st.sampled_from([0, 5, 40]),
        caches=st.booleans(),
        seed=st.integers(0, 2**16),
        budget=st.integers(1, 12),
    )
    def begin(self, depth: int, policy: type[Policy], num_slots: int, caches: bool, seed: int, budget: int) -> None:
        self.loop = make_loop(
            policy=policy(),
            num_blocks=7,
            num_slots=num_slots,
            depth=depth,
            max_model_len=MAX_MODEL_LEN,
            max_batched_tokens=budget,
            max_num_seqs=4,
            caches_prefixes=caches,
            seed=seed,
        )
        self.executor = FakeExecutor(block_tokens=4)
        self.now = 0.0
        self.results: list[StepResult] = []
        self.requests: dict[SeqId, Request] = {}
        self.outputs: dict[SeqId, list[int]] = {}
        self.ended: dict[SeqId, FinishReason] = {}

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    @rule(
        prefix=st.integers(0, 2),
        length=st.integers(1, 14),
        max_tokens=st.integers(1, 9),
        ignore_eos=st.booleans(),
        seed=st.integers(0, 9),
    )
    def submit(self, prefix: int, length: int, max_tokens: int, ignore_eos: bool, seed: int) -> None:
        shared = tuple(range(prefix * 10, prefix * 10 + 8))
        prompt = (shared + tuple(Random(seed).randint(0, 22) for _ in range(8)))[:length]
        request = make_request("r", prompt, self.tick(), max_tokens=max_tokens, ignore_eos=ignore_eos)
        seq_id = self.loop.submit(request)
        self.requests[seq_id] = request
        self.outputs[seq_id] = []

    @rule()
    def plan(self) -> None:
        plan = self.loop.next_plan(self.tick())
        if isinstance(plan, StepPlan):
            self.results.append(self.executor.execute(plan))

    @precondition(lambda self: self.results)
    @rule()
    def complete(self) -> None:
        outputs = self.loop.complete(self.results.pop(0), self.tick())
        for seq_id, token in zip(outputs.seq_ids, outputs.token_ids, strict=True):
            self.outputs[seq_id].append(token)
        self.ended |= outputs.finished

    @precondition(lambda self: self.executor.transfers)
    @rule(index=st.integers(0, 99), losses=st.sampled_from([0, 0, 0, 1, 2, 5, 0b11111111]), is_copied=st.booleans())
    def settle_transfer(self, index: int, losses: int, is_copied: bool) -> None:
        """End a transfer; each set bit of ``losses`` loses a block."""
        transfer = self.executor.transfers.pop(index % len(self.executor.transfers))
        lost = [place for place in range(len(transfer.blocks)) if losses >> place & 1]
        self.executor.copy(transfer, () if is_copied else lost)  # a lost block may have been written, or not
        self.loop.transfer_done(transfer.transfer_id, lost, self.tick())

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 99), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    def finish(self, index: int, reason: FinishReason) -> None:
        seq_id = list(self.requests)[index % len(self.requests)]
        was_alive = self.loop.finish(seq_id, reason, self.tick())
        assert was_alive == (seq_id not in self.ended)
        self.ended.setdefault(seq_id, reason)

    @precondition(lambda self: not self.results)
    @rule(num_blocks=st.integers(0, 7))
    def shrink_and_grow(self, num_blocks: int) -> None:
        ledger = self.loop.state.ledger
        shrink = plan_shrink(ledger, num_blocks)
        for source, destination in shrink.moves:
            self.executor.blocks[destination] = dict(self.executor.blocks.get(source, {}))
        self.loop.remap_blocks(commit_shrink(ledger, shrink))
        assert ledger.num_blocks == shrink.num_blocks >= num_blocks
        ledger.add_memory([b for b in range(7) if ledger.state(BlockId(b)) is BlockState.ABSENT])

    @invariant()
    def laws_hold(self) -> None:
        self.loop.check_integrity()
        for seq in self.loop.state.sequences.values():
            times = [when for when, _ in seq.lifecycle.events]
            assert times == sorted(times)
            assert len(seq.lifecycle.token_times_s) == len(seq.tokens) - seq.num_prompt

    def teardown(self) -> None:
        self.loop.policy = (
            FcfsPolicy()
        )  # at the end of the test, a work-conserving policy must finish every request that is left
        for _ in range(2000):
            if not self.loop.has_unfinished:
                break
            while self.executor.transfers:
                transfer = self.executor.transfers.pop()
                self.executor.copy(transfer)
                self.loop.transfer_done(transfer.transfer_id, (), self.tick())
            for seq in list(self.loop.state.swapped):  # FCFS resumes none from swap space: abort these
                self.loop.finish(seq.seq_id, FinishReason.ABORT, self.tick())
                self.ended[seq.seq_id] = FinishReason.ABORT
            self.plan()
            if self.results:
                self.complete()
        assert not self.loop.has_unfinished, "the loop did not come to rest"
        self.loop.check_integrity()
        ledger = self.loop.state.ledger
        assert ledger.num_available == ledger.num_blocks
        assert self.loop.state.backups.is_at_rest
        for seq_id, request in self.requests.items():
            expected = reference_output(request, MAX_MODEL_LEN)
            got = self.outputs[seq_id]
            assert got == expected[: len(got)]
            if self.ended[seq_id] is FinishReason.LENGTH:
                assert got == expected


LoopMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLoopMachine = LoopMachine.TestCase


# -- pins of ended requests' KV ----------------------------------------------------------------------------------------


class PinningMachine(LoopMachine):
    """The same loop, with the KV of ended requests pinned."""

    @initialize(
        depth=st.sampled_from([1, 2, 4]),
        policy=st.sampled_from([RandomPolicy, AheadPolicy, FcfsPolicy]),
        num_slots=st.sampled_from([5, 40]),
        seed=st.integers(0, 2**16),
        budget=st.integers(1, 12),
    )
    def begin(self, depth: int, policy: type[Policy], num_slots: int, seed: int, budget: int) -> None:
        begin = LoopMachine.begin
        getattr(begin, "__wrapped__", begin)(self, depth, policy, num_slots, True, seed, budget)
        self.loop.state.sessions = SessionBook(self.loop.state.backups)

    @invariant()
    def every_pin_is_that_of_a_session(self) -> None:
        if hasattr(self, "loop") and self.loop.state.sessions is not None:
            self.loop.state.sessions.check_integrity()


PinningMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPinningMachine = PinningMachine.TestCase
