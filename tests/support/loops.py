"""Loops with a fake executor that has no model: its next token is a function of all tokens before it.

The fake keeps its own replica of every block's content, so it fails if the loop reuses a block that still holds a
request's KV, does not fill one, or feeds a token at the wrong position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from random import Random

from floodplain.core.backups import BackupTable
from floodplain.core.blocks import BlockLedger
from floodplain.core.plan import (
    BackupOrder,
    Chunk,
    Decision,
    Preemption,
    PreemptionMode,
    PrefixBackupOrder,
    Reason,
    Resumption,
    StepPlan,
    StepResult,
    Transfer,
    TransferKind,
)
from floodplain.core.request import OrderKey, Request, SeqId
from floodplain.core.sampling import SamplingParams
from floodplain.core.sequence import Sequence
from floodplain.core.tiers import CopyTime, Link, SlotLedger, Tier
from floodplain.core.view import SequenceView, View
from floodplain.policy.base import Policy
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopConfig, LoopState

EOS = 7


def pick_lost(dice: Random, transfer: Transfer) -> list[int]:
    """Return the places of the lost blocks of a transfer that fails: at least one, and often all."""
    num_blocks = len(transfer.blocks)
    return sorted(dice.sample(range(num_blocks), dice.choice([1, dice.randint(1, num_blocks), num_blocks])))


def next_token(tokens: tuple[int, ...]) -> int:
    """The 'model': deterministic, depends on every token and every position, sometimes returns EOS."""
    value = 17
    for position, token in enumerate(tokens):
        value = (value * 31 + token * 7 + position) % 99991
    return value % 23


def reference_output(request: Request, max_model_len: int) -> list[int]:
    """Return the tokens that the request must produce, computed without an engine."""
    tokens = list(request.prompt_token_ids)
    limit = max_model_len if request.params.max_tokens is None else len(tokens) + request.params.max_tokens
    while len(tokens) < limit:
        tokens.append(next_token(tuple(tokens)))
        is_free_to_stop = len(tokens) > len(request.prompt_token_ids) + request.params.min_tokens
        if tokens[-1] == EOS and not request.params.ignore_eos and is_free_to_stop:
            break
    return tokens[len(request.prompt_token_ids) :]


@dataclass
class _Replica:
    table: list[int] = field(default_factory=list)
    last_token: int = -1
    position: int = 0


class FakeExecutor:
    """Executes plans over a pool of blocks that hold (position, token) pairs; also the swap space of an engine."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.blocks: dict[int, dict[int, tuple[int, int]]] = {}
        self.slots: dict[tuple[Tier, int], dict[int, tuple[int, int]]] = {}
        self.replicas: dict[SeqId, _Replica] = {}
        self.known: set[SeqId] = set()
        self.plans: list[StepPlan] = []
        self.transfers: list[Transfer] = []
        self.results: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Run a plan at once."""
        self.results.append(self.execute(plan))

    def collect(self) -> StepResult:
        """Return the oldest result that was not collected."""
        return self.results.popleft()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a plan at once; its transfers stay in ``transfers`` until the test copies them."""
        self.plans.append(plan)
        for seq_id in plan.released:
            self.replicas.pop(seq_id, None)
            self.known.discard(seq_id)
        for update in plan.tables:
            replica = self.replicas.setdefault(update.seq_id, _Replica())
            replica.table[update.start :] = list(update.blocks)
        self.transfers += plan.transfers
        tokens = [self._decode(seq_id) for seq_id in plan.decodes]
        for chunk in plan.prefills:
            assert (chunk.request is not None) == (chunk.seq_id not in self.known)
            self.known.add(chunk.seq_id)
            replica = self.replicas[chunk.seq_id]
            for offset, token in enumerate(chunk.token_ids):
                self._write(replica, chunk.start + offset, token)
            replica.position = chunk.start + len(chunk.token_ids)
            if chunk.samples:
                tokens.append(self._sample(replica))
        return StepResult(plan.step_id, tokens)

    def copy(self, transfer: Transfer, lost: Collection[int] = ()) -> None:
        """Move the content of a transfer except at the places ``lost``, between any two steps."""
        for place, (block, location) in enumerate(zip(transfer.blocks, transfer.locations, strict=True)):
            if place in lost:
                continue
            slot = (location.tier, location.slot)
            if transfer.kind is TransferKind.SWAP_IN:
                self.blocks[block] = dict(self.slots[slot])
            else:
                self.slots[slot] = dict(self.blocks[block])

    def poll(self) -> list[tuple[int, Collection[int]]]:
        """Return nothing: copies end only when the loop waits for them."""
        return []

    def take_copy_times(self) -> list[CopyTime]:
        return []

    def wait(self, timeout_s: float) -> list[tuple[int, Collection[int]]]:
        """End the oldest copy at once."""
        if not self.transfers:
            return []
        transfer = self.transfers.pop(0)
        self.copy(transfer)
        return [(transfer.transfer_id, ())]

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _decode(self, seq_id: SeqId) -> int:
        replica = self.replicas[seq_id]
        self._write(replica, replica.position, replica.last_token)
        replica.position += 1
        return self._sample(replica)

    def _write(self, replica: _Replica, position: int, token: int) -> None:
        block = replica.table[position // self.block_tokens]
        content = self.blocks.setdefault(block, {})
        if position % self.block_tokens == 0:
            content.clear()
        content[position % self.block_tokens] = (position, token)

    def _sample(self, replica: _Replica) -> int:
        tokens = []
        for position in range(replica.position):
            block = replica.table[position // self.block_tokens]
            held, token = self.blocks[block][position % self.block_tokens]
            assert held == position, f"position {position} reads KV of position {held}"
            tokens.append(token)
        replica.last_token = next_token(tuple(tokens))
        return replica.last_token


class AheadPolicy(FcfsPolicy):
    """FCFS that does not skip outstanding sequences: a decode is planned before the token that it feeds is known."""

    name = "ahead"

    def decide(self, view: View, now: float, rng: Random) -> Decision:
        return super().decide(replace(view, depth=1), now, rng)


class RandomPolicy:
    """Makes any decision that a view allows: preempts, swaps, resumes, fetches, backs up, pauses, chunks at random.

    Attributes:
        num_refusals: How often swap space had no room for a request that was to be copied.
    """

    name = "random"
    waiting_window, num_newest = 4, 0
    keeps_goals = False
    chooses_admissions = False

    def __init__(self) -> None:
        self._fcfs = AheadPolicy()
        self.num_refusals = 0

    def waiting_key(self, seq: Sequence) -> OrderKey:
        return seq.order_key

    def decide(self, view: View, now: float, rng: Random) -> Decision:
        for _ in range(8):
            decision = self._dice(view, now, rng)
            is_moving = decision.preemptions or decision.resumptions  # if no copy begins, ask again
            if is_moving or _computes(decision) or is_under_way(view):
                return decision
        return self._work(view, now, rng)

    def rest(self, view: View, now: float, rng: Random) -> Decision:
        """Decide nothing while a step or a copy is in flight; else work."""
        return Decision() if is_under_way(view) else self._work(view, now, rng)

    def _work(self, view: View, now: float, rng: Random) -> Decision:
        """Decide as FCFS; if that has nothing to run, resume the first sequence that fits."""
        decision = self._fcfs.decide(view, now, rng)
        if _computes(decision) or decision.preemptions or decision.resumptions:
            return decision
        return Decision(resumptions=self._resume_one(view))

    def _dice(self, view: View, now: float, rng: Random) -> Decision:
        if view.tiers and rng.random() < 0.1:  # FCFS would give the same blocks away
            num_blocks = rng.randint(1, 4)
            order = PrefixBackupOrder(2 * num_blocks, num_blocks, view.tiers[0].tier)
            decodes = () if is_under_way(view) else self._decodes(view, list(view.running))
            return Decision(decodes=decodes, prefix_backup=order)
        base = self._fcfs.decide(view, now, rng)
        if rng.random() < 0.5:
            return self._resume_too(view, base, rng)
        victims = [row for row in view.running if row.seq_id not in view.outstanding and rng.random() < 0.4]
        slots = {tier.tier: tier.num_free_slots for tier in view.tiers}
        preemptions = tuple(self._preempt(row, slots, rng) for row in victims)
        gone = {row.seq_id for row in victims}
        stays = [row for row in view.running if row.seq_id not in gone]
        backups = tuple(
            BackupOrder(row.seq_id, row.num_blocks, tier)
            for row in stays
            for tier in slots
            if rng.random() < 0.3 and self._pay(slots, tier, row.num_blocks - row.num_backed_blocks)
        )[:1]
        return Decision(preemptions=preemptions, decodes=self._decodes(view, stays), backups=backups)

    def _decodes(self, view: View, rows: list[SequenceView]) -> tuple[SeqId, ...]:
        """Return decodes that need no new block: FCFS does not decide this step."""
        return tuple(r.seq_id for r in rows if r.is_decoding and view.step < min(r.end_step, r.block_due_step))

    def _preempt(self, row: SequenceView, slots: dict[Tier, int], rng: Random) -> Preemption:
        num_slots = row.num_blocks - row.num_backed_blocks
        for tier in slots:
            if rng.random() < 0.8 and self._pay(slots, tier, num_slots):
                return Preemption(row.seq_id, PreemptionMode.SWAP, Reason.SLICE_ENDED, tier)
        return Preemption(row.seq_id, PreemptionMode.RECOMPUTE, Reason.SLICE_ENDED)

    def _pay(self, slots: dict[Tier, int], tier: Tier, num_slots: int) -> bool:
        if slots[tier] < num_slots:
            self.num_refusals += 1
            return False
        slots[tier] -= num_slots
        return True

    def _resume_too(self, view: View, base: Decision, rng: Random) -> Decision:
        """Resume a sequence alone, since FCFS has spent the view's free blocks; else ``base`` with random chunks."""
        if resumptions := self._resume_one(view):
            return Decision(resumptions=resumptions)
        chunks = tuple(Chunk(c.seq_id, rng.randint(1, c.num_tokens)) for c in base.chunks)
        admissions = tuple(Chunk(c.seq_id, rng.randint(1, c.num_tokens)) for c in base.admissions)
        return Decision(
            preemptions=base.preemptions,
            resumptions=base.resumptions,
            decodes=base.decodes,
            chunks=chunks,
            admissions=admissions,
        )

    def _resume_one(self, view: View) -> tuple[Resumption, ...]:
        num_on_device = len(view.running) + len(view.loading)
        for row in view.swapped:
            num_blocks = -(-row.num_restorable_tokens // view.block_tokens) - row.num_shared_blocks
            if num_blocks <= view.num_available_blocks and num_on_device < view.max_num_seqs:
                return (Resumption(row.seq_id, Reason.SLICE_BEGINS),)
        return ()


def is_under_way(view: View) -> bool:
    """Whether a step or a copy is in flight, so that a policy may idle: its end requests another decision."""
    copying = any(tier.num_outbound_blocks or tier.num_inbound_blocks for tier in view.tiers)
    return copying or bool(view.outstanding)


def _computes(decision: Decision) -> bool:
    return bool(decision.decodes or decision.chunks or decision.admissions)


def make_loop(
    *,
    policy: Policy | None = None,
    num_blocks: int = 8,
    block_tokens: int = 4,
    num_slots: int = 0,
    depth: int = 1,
    max_model_len: int = 64,
    max_batched_tokens: int = 16,
    max_num_seqs: int = 8,
    max_waiting: int = 1000,
    caches_prefixes: bool = True,
    pins_sessions: bool = False,
    block_bytes: int = 0,
    seed: int = 0,
) -> Loop:
    """A loop over a small pool, with one swap tier if there are slots."""
    policy = policy or FcfsPolicy()
    config = LoopConfig(
        max_model_len=max_model_len,
        max_batched_tokens=max_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_waiting=max_waiting,
        depth=depth,
        eos_token_ids=frozenset({EOS}),
        fingerprint="fake",
        block_bytes=block_bytes,
        pins_sessions=pins_sessions,
    )
    ledger = BlockLedger(num_blocks, block_tokens, quantum_blocks=2, caches_prefixes=caches_prefixes)
    backups = BackupTable([SlotLedger(Tier.HOST, num_slots)] if num_slots else [], retains=caches_prefixes)
    state = LoopState(config, ledger, policy, backups, [Link(Tier.HOST, 1e9)])
    return Loop(state, policy, seed)


def make_request(name: str, prompt: tuple[int, ...], arrival_s: float = 0.0, **params: object) -> Request:
    """A greedy request."""
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(temperature=0.0, **params),  # type: ignore[arg-type]
        arrival_s=arrival_s,
    )
