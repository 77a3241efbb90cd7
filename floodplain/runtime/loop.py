"""The step loop: makes plans and takes results. It does not wait, read a clock, or touch a device.

plan = loop.next_plan(now)                       a StepPlan, or Wait
outputs = loop.complete(result, now)             steps, in the order of their ids
loop.transfer_done(transfer_id, lost, now)       copies, in any order, at any time
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise, repeat
from math import inf
from random import Random

from floodplain.core.errors import InvariantError, QueueFull, RequestRefused
from floodplain.core.free_blocks import BlockId
from floodplain.core.hashing import root_key
from floodplain.core.lifecycle import EventKind
from floodplain.core.plan import NO_TOKEN, Decision, StepOutputs, StepPlan, StepResult, Wait
from floodplain.core.request import NO_GOALS, FinishReason, Request, SeqId
from floodplain.core.sequence import Sequence, Status
from floodplain.policy.base import Policy
from floodplain.runtime.apply import PlanBuilder
from floodplain.runtime.relocations import Relocations
from floodplain.runtime.standing import LastDecision
from floodplain.runtime.state import Counters, LoopState
from floodplain.runtime.swaps import Swaps
from floodplain.runtime.view import ViewBuilder


@dataclass(frozen=True, slots=True)
class _Outstanding:
    plan: StepPlan
    decoding: list[Sequence]
    chunked: list[Sequence]
    issued_s: float
    has_copies: bool


class Loop:
    """Owner of all sequences from submission to their end, and of ``relocations`` between tiers."""

    def __init__(self, state: LoopState, policy: Policy, seed: int = 0) -> None:
        self.state = state
        self.policy = policy
        self._rng = Random(seed)
        self.relocations = Relocations(state)
        self._swaps = Swaps(state)
        self._views = ViewBuilder(state)
        self._plans = PlanBuilder(state, self._swaps)
        self._last = LastDecision(state)
        self._steps: deque[_Outstanding] = deque()
        self._last_end_s = -inf
        self._ended: list[Sequence] = []  # finished, but outstanding steps still touch their blocks
        self.num_submitted = 0

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> SeqId:
        """Queue a request; returns its sequence id. RequestRefused as in ``check``; QueueFull if too many wait."""
        max_total, config = self.check(request), self.state.config
        num_free_seqs = max(0, config.max_num_seqs - len(self.state.running))  # these can run next: not counted
        if len(self.state.waiting) >= config.max_waiting + num_free_seqs and not request.is_accepted:
            raise QueueFull(f"{config.max_waiting} requests are waiting already; try again later")
        seq_id = SeqId(self.num_submitted)
        self.num_submitted += 1
        stop_ids = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            stop_ids |= config.eos_token_ids
        salt = request.cache_salt
        if request.params.prompt_logprobs is not None:  # blocks that others computed have no logits
            salt = f"{salt}\0 scored {seq_id}"
        root = root_key(config.fingerprint, salt)
        seq = Sequence(seq_id, request, root=root, max_total=max_total, stop_ids=stop_ids)
        self.state.arrive(seq)
        return seq_id

    def finish(self, seq_id: SeqId, reason: FinishReason, now: float) -> bool:
        """End a request from outside (a client disconnected: ABORT, a stop string: STOP); returns whether it was live.

        Its blocks are freed at once, or when the outstanding step that touches them completes.
        """
        seq = self.state.sequences.get(seq_id)
        if seq is None or seq.status is Status.FINISHED:
            return False
        self._end(seq, reason, now)
        return True

    def check(self, request: Request) -> int:
        """The most tokens of a request, prompt included. RequestRefused, with numbers, if it can never be served."""
        max_model_len, ledger = self.state.config.max_model_len, self.state.ledger
        num_prompt, max_tokens = len(request.prompt_token_ids), request.params.max_tokens
        if not num_prompt:
            raise RequestRefused("the prompt is empty: send at least one token", field="prompt")
        if request.goals != NO_GOALS and not self.state.keeps_goals:
            why = "without swap space" if self.policy.keeps_goals else f"by {self.policy.name}"
            raise RequestRefused(f"no goals are kept {why}: leave {request.goals.field} out", request.goals.field)
        total = max_model_len if max_tokens is None else num_prompt + max_tokens
        if num_prompt >= max_model_len or total > max_model_len:
            wanted = f"{num_prompt} prompt tokens + max_tokens {max_tokens if max_tokens is not None else 1}"
            raise RequestRefused(f"{wanted} are more than the {max_model_len} tokens of max_model_len")
        if num_prompt + len(request.known_token_ids) >= total:
            raise RequestRefused(f"{len(request.known_token_ids)} known tokens leave nothing to generate of {total}")
        num_blocks, most_blocks = -(-total // ledger.block_tokens), ledger.num_blocks + self.state.num_returning_blocks
        if num_blocks > most_blocks:
            raise RequestRefused(
                f"{total} tokens (prompt {num_prompt} + output) need {num_blocks} KV blocks, but the pool has "
                f"{most_blocks}: lower max_tokens, or give the pool more memory"
            )
        return total

    # -- steps -----------------------------------------------------------------------------------------------------

    def next_plan(self, now: float) -> StepPlan | Wait:
        """Plan one more step; Wait if nothing can run. InvariantError if a policy never runs what could run."""
        state = self.state
        if len(self._steps) >= state.config.depth:
            return Wait()
        for _ in range(2 + 2 * len(state.sequences)):
            saves = self._swaps.save_pinned(now)  # before the view, which counts their blocks as draining
            has_work = bool(state.running or state.waiting or state.swapped)
            if not (has_work or saves) or not state.ledger.num_blocks:
                return Wait()
            state.trim_logs()
            state.links.note_step(state.counters.num_steps)
            if not saves and (decision := self._last.find(state.counters.num_steps)) is not None:
                return self._repeat(decision, now)
            view = self._views.build(state.counters.num_steps, [step.plan for step in self._steps])
            decision = self.policy.decide(view, now, self._rng) if has_work else Decision()
            self._last.note(self.policy, view, decision)
            plan, decoding, chunked = self._plans.build(view, decision, saves, now)
            if plan.decodes or plan.prefills or plan.transfers:
                return self._issue(decision, _Outstanding(plan, decoding, chunked, now, bool(state.transfers)))
            self._postpone(plan)
            if not decision.preemptions and not decision.resumptions:
                return self._wait_or_stall()
        raise InvariantError(f"policy {self.policy.name} preempts and resumes without end")

    def _repeat(self, decision: Decision, now: float) -> StepPlan:
        plan, decoding = self._plans.repeat(self.state.counters.num_steps, decision.decodes)
        return self._issue(decision, _Outstanding(plan, decoding, [], now, bool(self.state.transfers)))

    def _issue(self, decision: Decision, step: _Outstanding) -> StepPlan:
        counters = self.state.counters
        counters.num_steps += 1
        if decision.reason is not None:
            counters.limited_steps[decision.reason.value] += 1
        self._steps.append(step)
        self._last.keep(step.plan)
        return step.plan

    def _postpone(self, plan: StepPlan) -> None:
        """Keep preemptions, releases and tables of a plan without work for the next plan; it is not issued."""
        self.state.preempted[:0] = plan.preemptions
        self.state.released[:0] = plan.released
        self.state.stale_tables.update(table.seq_id for table in plan.tables)

    def _wait_or_stall(self) -> Wait:
        if not self._steps and not self.state.transfers and not self.state.awaits_blocks:
            raise InvariantError(f"policy {self.policy.name} runs nothing while requests are alive")
        return Wait()

    def complete(self, result: StepResult, now: float) -> StepOutputs:
        """Process the result of the oldest outstanding step.

        ``NO_TOKEN`` ends its request (ABORT). InvariantError if it is not that step's result, or of a wrong length.
        """
        if not self._steps or self._steps[0].plan.step_id != result.step_id:
            raise InvariantError(f"step {result.step_id} completes out of order")
        step = self._steps.popleft()
        sampling = self._commit_chunks(step)
        num_expected = len(step.plan.decodes) + len(sampling)
        if len(result.token_ids) != num_expected:
            raise InvariantError(f"step {result.step_id} has {len(result.token_ids)} tokens, not {num_expected}")
        seq_ids: list[SeqId] = []
        token_ids: list[int] = []
        finished: dict[SeqId, FinishReason] = {}
        block_tokens = self.state.ledger.block_tokens
        for seq in step.decoding:
            seq.num_computed += 1
            if not seq.num_computed % block_tokens:
                self._seal(seq)
            seq.num_outstanding -= 1
        for seq, token in zip(step.decoding + sampling, result.token_ids, strict=True):
            seq.num_sampling -= 1
            if seq.status is Status.FINISHED:
                self.state.counters.num_wasted_tokens += 1
                continue
            if token == NO_TOKEN:
                finished[seq.seq_id] = FinishReason.ABORT
                continue
            tokens = seq.tokens
            tokens.append(token)
            seq.lifecycle.token_times_s.append(now)
            seq_ids.append(seq.seq_id)
            token_ids.append(token)
            if token in seq.stop_ids and len(tokens) > seq.min_total:
                finished[seq.seq_id] = FinishReason.STOP
            elif len(tokens) >= seq.max_total:
                finished[seq.seq_id] = FinishReason.LENGTH
        self.state.counters.num_generated_tokens += len(token_ids)
        duration_s = now - max(step.issued_s, self._last_end_s)  # it was queued while the step before it computed
        self._last_end_s = now
        has_copies = step.has_copies or bool(self.state.transfers)
        self.state.prices.learn(*step.plan.count_work(), duration_s, has_copies=has_copies)
        self.state.note_supply(duration_s, len(token_ids), finished)
        for seq_id, reason in finished.items():
            self._end(self.state.sequences[seq_id], reason, now)
        if self._ended:
            self._release_ended(now)
        return StepOutputs(seq_ids, token_ids, finished, result.logprobs, result.prompt_logprobs)

    def look_ahead(self, token: int, most: int) -> tuple[tuple[SeqId, ...], int]:
        """(the decodes of the last step, how many steps can only repeat it and end no request if all sample ``token``).

        Unless a request arrives or a copy ends. At most ``most``; 0 if a step is outstanding, or pins expire with time.
        """
        decodes = () if self._steps or self.state.sessions is not None else self._last.decodes
        seqs = [self.state.sequences[seq_id] for seq_id in decodes if seq_id in self.state.sequences]
        if not seqs or any(token in seq.stop_ids for seq in seqs):
            return (), 0
        return self._plans.last_decodes, self._last.count_ahead(self.state.counters.num_steps, most)

    def advance(self, token: int, begin_s: float, ends_s: Seq[float]) -> None:
        """Plan and complete as many steps at once as there are ``ends_s``, at most those of ``look_ahead``.

        Each begins when the one before it ends. For executors that need no block tables.
        """
        state, counters = self.state, self.state.counters
        state.trim_logs()
        decodes, num_steps = self._last.decodes, len(ends_s)
        decode_ahead(state, [state.sequences[seq_id] for seq_id in decodes], token, ends_s)
        for step, (before_s, end_s) in enumerate(pairwise([begin_s, *ends_s]), counters.num_steps):
            state.links.note_step(step)
            state.prices.learn(len(decodes), 0, end_s - before_s, has_copies=bool(state.transfers))
            state.note_supply(end_s - before_s, len(decodes), ())
        counters.num_steps += num_steps
        counters.num_generated_tokens += num_steps * len(decodes)
        self._last_end_s = ends_s[-1]
        self._last.keep(StepPlan(counters.num_steps))

    def transfer_done(self, transfer_id: int, lost: Seq[int], now: float) -> None:
        """End a copy; blocks at places ``lost`` of ``Transfer.blocks`` are lost. InvariantError if not in flight."""
        move, missing = self.state.transfers.end(transfer_id, lost)
        self._swaps.settle(move, lost, now)
        if missing:
            self.state.drop_lost(missing)
            self.state.counters.num_failed_transfers += 1

    # -- the pool --------------------------------------------------------------------------------------------------

    def remap_blocks(self, moved: dict[BlockId, BlockId]) -> None:
        """Rewrite block tables after the pool shrank at this boundary; InvariantError if a step is outstanding."""
        if self._steps:
            raise InvariantError("blocks move while a step is outstanding")
        for seq in self.state.sequences.values():
            if not moved.keys().isdisjoint(seq.blocks):
                seq.blocks = [moved.get(block, block) for block in seq.blocks]
                self.state.stale_tables.add(seq.seq_id)
        self._swaps.remap_blocks(moved)

    @property
    def counters(self) -> Counters:
        """Totals since the loop began."""
        return self.state.counters

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is live, or a step or copy is outstanding or about to begin."""
        return bool(self.state.sequences or self._steps or self.state.transfers or self.state.unsaved_pins)

    def check_integrity(self) -> None:
        """Raise InvariantError if any conservation law is broken."""
        state = self.state
        state.ledger.check_integrity(state.block_tables() + self._swaps.shared_tables())
        state.backups.check_integrity()
        groups = [state.running, state.swapped, state.loading]
        for group in groups:
            if any(a.order_key > b.order_key for a, b in pairwise(group)):
                raise InvariantError("sequences are out of order")
        num_alive = sum(seq.status is not Status.FINISHED for seq in state.sequences.values())
        if num_alive != len(state.waiting) + sum(len(group) for group in groups):
            raise InvariantError("a sequence is in no collection, or in two")

    # -- inside ----------------------------------------------------------------------------------------------------

    def _commit_chunks(self, step: _Outstanding) -> list[Sequence]:
        """Count the chunks as computed; return the sequences whose chunks sampled a token."""
        sampling = []
        for seq, chunk in zip(step.chunked, step.plan.prefills, strict=True):
            seq.num_computed += len(chunk.token_ids)
            seq.num_outstanding -= 1
            self._seal(seq)
            if chunk.samples:
                sampling.append(seq)
        return sampling

    def _seal(self, seq: Sequence) -> None:
        """Register the content keys of blocks that are full of computed tokens now.

        A sequence ended from outside may have computed a token that is not in ``tokens``: its block gets no key.
        """
        block_tokens = self.state.ledger.block_tokens
        num_full = min(seq.num_computed, len(seq.tokens)) // block_tokens
        keys = seq.keys_for(num_full, block_tokens)
        for index in range(seq.num_sealed, num_full):
            self.state.ledger.seal(seq.blocks[index], keys[index])
        seq.num_sealed = num_full

    def _end(self, seq: Sequence, reason: FinishReason, now: float) -> None:
        seq.finish_reason = reason
        seq.lifecycle.record(EventKind.FINISHED, now)
        self.state.enter(seq, Status.FINISHED)
        self.state.counters.finished[reason.value] += 1
        self.state.keep_place(seq, now)
        if len(seq.tokens) > seq.num_prompt:
            self.state.prices.learn_end(seq.num_prompt - seq.lifecycle.num_cached_tokens)
        self.state.completion_step = self.state.counters.num_steps
        self.state.close_account(seq)
        if seq.num_outstanding:
            self._ended.append(seq)
        else:
            self.state.release(seq, now)

    def _release_ended(self, now: float) -> None:
        for seq in [seq for seq in self._ended if not seq.num_outstanding]:
            self._ended.remove(seq)
            self.state.release(seq, now)


def decode_ahead(state: LoopState, seqs: Seq[Sequence], token: int, ends_s: Seq[float]) -> None:
    """Give each sequence ``token`` in each of the steps that end at ``ends_s``. InvariantError: too few blocks."""
    num_steps, block_tokens = len(ends_s), state.ledger.block_tokens
    at_boundary: list[list[tuple[Sequence, int]]] = [[] for _ in range(num_steps + 1)]  # with their tokens, by steps
    for seq in seqs:
        for place in range(-seq.num_computed % block_tokens, num_steps + 1, block_tokens):
            at_boundary[place].append((seq, seq.num_computed + place))
        seq.tokens.extend(repeat(token, num_steps))
        seq.lifecycle.token_times_s.extend(ends_s)
        seq.num_computed += num_steps
        seq.num_scheduled += num_steps
        seq.keys_for(seq.num_computed // block_tokens, block_tokens)
    for place, due in enumerate(at_boundary):
        if place:
            _seal(state, due)
        if place < num_steps:
            _grow(state, due)


def _seal(state: LoopState, due: Seq[tuple[Sequence, int]]) -> None:
    for seq, _ in due:
        state.ledger.seal(seq.blocks[seq.num_sealed], seq.keys[seq.num_sealed])
        seq.num_sealed += 1


def _grow(state: LoopState, due: Seq[tuple[Sequence, int]]) -> None:
    for seq, num_tokens in due:
        if num_tokens == len(seq.blocks) * state.ledger.block_tokens:
            blocks = state.ledger.allocate(1)
            if blocks is None:
                raise InvariantError("a decision stood although blocks are short")
            seq.blocks += blocks
            state.row_changes.add(seq.seq_id)
