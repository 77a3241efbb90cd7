"""Turns step plans into batches, keeps a runner's state of each sequence between steps, and scores prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from floodplain.core.plan import PrefillChunk, PromptLogprobs, StepPlan, TableUpdate, TokenLogprobs
from floodplain.core.request import Request, SeqId
from floodplain.core.sampling import SamplingParams
from floodplain.model.batch import ForwardBatch, PrefillSegment
from floodplain.model.logits import Histories
from floodplain.model.structure import Grammars
from floodplain.model.token_history import TokenHistory

ROWS_AT_ONCE = 64
"""Rows whose logits are in memory at once: with 150,000 tokens, 38 MB."""

LogitsOf = Callable[[torch.Tensor], torch.Tensor]
"""Logits [N, vocab] of the last layer's activations [N, hidden]."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: tuple[int, ...]
    num_top: int
    found: dict[int, TokenLogprobs]


class PromptScores:
    """The scores of prompts that a runner computes. A chunk that is computed again replaces its scores."""

    def __init__(self) -> None:
        self._prompts: dict[SeqId, _Prompt] = {}

    def begin(self, seq_id: SeqId, request: Request) -> None:
        """Score the prompt of a new request, if it asks for that."""
        if request.params.prompt_logprobs is not None:
            self._prompts[seq_id] = _Prompt(request.prompt_token_ids, request.params.prompt_logprobs, {})

    def release(self, seq_id: SeqId) -> None:
        """Forget a request; no-op for one that is not scored."""
        self._prompts.pop(seq_id, None)

    def add(self, plan: StepPlan, x: torch.Tensor, logits_of: LogitsOf) -> dict[SeqId, PromptLogprobs]:
        """Score prompt tokens after those of a step, from activations x [T, hidden]; returns ended prompts' scores."""
        if not self._prompts:
            return {}
        ended: dict[SeqId, PromptLogprobs] = {}
        for chunk, row in _rows_of_chunks(plan):
            prompt = self._prompts.get(chunk.seq_id)
            if prompt is not None:
                _score(prompt, chunk.start, x[row : row + len(chunk.token_ids)], logits_of)
                if chunk.samples:
                    ended[chunk.seq_id] = _whole(prompt)
                    del self._prompts[chunk.seq_id]
        return ended


def _rows_of_chunks(plan: StepPlan) -> Iterator[tuple[PrefillChunk, int]]:
    """The chunks of a plan with their first rows in its batch: those of one token come behind the decodes."""
    row = len(plan.decodes)
    for is_single in (True, False):
        for chunk in plan.prefills:
            if (len(chunk.token_ids) == 1) == is_single:
                yield chunk, row
                row += len(chunk.token_ids)


def _score(prompt: _Prompt, start: int, x: torch.Tensor, logits_of: LogitsOf) -> None:
    """Score the tokens that follow the positions from ``start`` on."""
    for begin in range(0, len(x), ROWS_AT_ONCE):
        first = start + begin + 1
        followers = prompt.token_ids[first : first + min(ROWS_AT_ONCE, len(x) - begin)]
        if not followers:
            return
        logprobs = logits_of(x[begin : begin + len(followers)]).log_softmax(-1)
        token_ids = torch.tensor(followers, device=x.device)
        chosen = logprobs.gather(1, token_ids[:, None])
        ranks = (logprobs >= chosen).sum(1).tolist()
        values, tops = logprobs.topk(min(prompt.num_top, logprobs.shape[-1]))
        rows = zip(chosen[:, 0].tolist(), tops.tolist(), values.tolist(), ranks, strict=True)
        for position, (value, ids, tops_of_row, rank) in enumerate(rows, first):
            prompt.found[position] = TokenLogprobs(value, tuple(zip(ids, tops_of_row, strict=True)), rank)


def _whole(prompt: _Prompt) -> PromptLogprobs:
    """All scores; none if some are missing, because KV of the prompt came from another engine."""
    positions = range(1, len(prompt.token_ids))
    return tuple(prompt.found[position] for position in positions) if len(prompt.found) == len(positions) else ()


IntArray = npt.NDArray[np.int64]


class SequenceSlots:
    """Block table, next position and last token of every sequence that the loop has not released.

    Arrays, so that a decode step needs no Python loop; their index is the *row* of a sequence, which keeps it until it
    is released, even while it is off the device.

    Attributes:
        tables: [rows, max_blocks] block ids.
        positions: [rows] position of the next token to feed.
        last_tokens: [rows] that token, once the sequence has sampled one.
        num_generated: [rows] tokens generated so far, elsewhere and here.
    """

    def __init__(self, max_blocks: int, num_rows: int = 64) -> None:
        self.tables: IntArray = np.zeros((num_rows, max_blocks), dtype=np.int64)
        self.positions: IntArray = np.zeros(num_rows, dtype=np.int64)
        self.last_tokens: IntArray = np.zeros(num_rows, dtype=np.int64)
        self.num_generated: IntArray = np.zeros(num_rows, dtype=np.int64)
        self._rows: dict[SeqId, int] = {}
        self._free = list(range(num_rows - 1, -1, -1))

    def row(self, seq_id: SeqId) -> int:
        """The row of a sequence; a new one if it has none."""
        row = self._rows.get(seq_id)
        if row is None:
            if not self._free:
                self._double()
            row = self._rows[seq_id] = self._free.pop()
            self.num_generated[row] = 0
        return row

    def rows(self, seq_ids: Sequence[SeqId]) -> IntArray:
        """The rows of sequences, [len(seq_ids)]."""
        return np.fromiter(map(self._rows.__getitem__, seq_ids), dtype=np.int64, count=len(seq_ids))

    def update_table(self, update: TableUpdate) -> None:
        """Write the new entries of a block table."""
        row, end = self.row(update.seq_id), update.start + len(update.blocks)  # a new row may replace ``tables``
        self.tables[row, update.start : end] = update.blocks

    def release(self, seq_id: SeqId) -> None:
        """Free the row of a sequence; no-op without one."""
        row = self._rows.pop(seq_id, None)
        if row is not None:
            self._free.append(row)

    def _double(self) -> None:
        num_rows = len(self.positions)
        for name in ("tables", "positions", "last_tokens", "num_generated"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate((array, np.zeros_like(array))))
        self._free = list(range(2 * num_rows - 1, num_rows - 1, -1))


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Rows that feed one token, chunks of several tokens behind them, and each token's KV slot, int64 [T]."""

    single: IntArray
    runs: Sequence[PrefillChunk]
    slot_mapping: IntArray


class Batches:
    """Owner of a runner's state between steps. Plans are applied in their order; batches lie on ``device``."""

    def __init__(
        self, device: torch.device, *, block_tokens: int, max_model_len: int, grammars: Grammars | None = None
    ) -> None:
        self._grammars = grammars
        self.scores = PromptScores()
        self.slots = SequenceSlots(max_blocks=-(-max_model_len // block_tokens))
        self._device = device
        self._block_tokens = block_tokens
        self._params: dict[SeqId, SamplingParams] = {}
        self._decodes: tuple[SeqId, ...] = ()
        self._decode_rows: IntArray = np.zeros(0, dtype=np.int64)
        self._sampled: tuple[SeqId, ...] = ()
        self._sampled_rows: IntArray = self._decode_rows
        self._sampled_params: list[SamplingParams] = []
        self._histories: dict[SeqId, TokenHistory] = {}
        self._sampled_histories: dict[int, TokenHistory] = {}

    def apply(self, plan: StepPlan) -> None:
        """Apply the releases, tables and new requests of a plan."""
        for seq_id in plan.released:
            self.slots.release(seq_id)
            self._params.pop(seq_id, None)
            self._histories.pop(seq_id, None)
            self.scores.release(seq_id)
        for update in plan.tables:
            self.slots.update_table(update)
        for chunk in plan.prefills:
            if chunk.request is not None:
                if chunk.seq_id not in self._params:  # else it was readmitted: its count of tokens continues
                    row = self.slots.row(chunk.seq_id)
                    self.slots.num_generated[row] = len(chunk.request.known_token_ids)
                    self.scores.begin(chunk.seq_id, chunk.request)
                    if chunk.request.params.uses_history:
                        self._histories[chunk.seq_id] = TokenHistory(chunk.request, self._grammars)
                self._params[chunk.seq_id] = chunk.request.params
        if plan.decodes is not self._decodes:
            self._decodes = plan.decodes
            self._decode_rows = self.slots.rows(plan.decodes)

    def make(self, plan: StepPlan) -> tuple[ForwardBatch, BatchRows] | None:
        """Make the batch: decodes first, then chunks, computed on arrays. None if the plan computes nothing."""
        slots, block_tokens = self.slots, self._block_tokens
        if not plan.decodes and not plan.prefills:
            return None
        rows = self._rows_of_one_token(plan)
        positions = slots.positions[rows]
        max_context = int(positions.max()) + 1 if len(rows) else 0
        token_ids, all_rows, all_positions = [slots.last_tokens[rows]], [rows], [positions]
        runs = [chunk for chunk in plan.prefills if len(chunk.token_ids) > 1]
        for chunk in runs:
            count = len(chunk.token_ids)
            token_ids.append(np.array(chunk.token_ids, dtype=np.int64))
            all_rows.append(np.full(count, slots.row(chunk.seq_id)))
            all_positions.append(np.arange(chunk.start, chunk.start + count))
        row, position = np.concatenate(all_rows), np.concatenate(all_positions)
        slot_mapping = slots.tables[row, position // block_tokens] * block_tokens + position % block_tokens
        batch = ForwardBatch(
            token_ids=self._tensor(np.concatenate(token_ids)),
            positions=self._tensor(position),
            slot_mapping=self._tensor(slot_mapping),
            block_tables=self._tensor(slots.tables[rows, : -(-max_context // block_tokens)]),
            context_lens=self._tensor(positions + 1),
            max_context_len=max_context,
            prefills=self._segments(runs, len(rows)),
            logits_rows=self._tensor(_logits_rows(plan)),
        )
        return batch, BatchRows(rows, runs, slot_mapping)

    def advance(self, plan: StepPlan) -> None:
        """Advance positions past the plan's batch, which has been computed."""
        slots = self.slots
        slots.positions[self._decode_rows] += 1
        for chunk in plan.prefills:
            slots.positions[slots.row(chunk.seq_id)] = chunk.start + len(chunk.token_ids)

    def sampled(self, plan: StepPlan) -> tuple[IntArray, list[SamplingParams], Histories]:
        """(rows, sampling parameters, histories by index) of ``plan.sampled``."""
        sampled = plan.sampled
        if sampled != self._sampled:
            self._sampled = sampled
            self._sampled_rows = self.slots.rows(sampled)
            self._sampled_params = [self._params[seq_id] for seq_id in sampled]
            histories = self._histories
            self._sampled_histories = (
                {index: histories[seq_id] for index, seq_id in enumerate(sampled) if seq_id in histories}
                if histories
                else {}
            )
        return self._sampled_rows, self._sampled_params, self._sampled_histories

    def take_tokens(self, rows: IntArray, tokens: npt.NDArray[np.int64]) -> None:
        """Store sampled tokens as the next inputs of these rows. Rows without a token end; a step may be on its way."""
        self.slots.last_tokens[rows] = np.maximum(tokens, 0)
        self.slots.num_generated[rows] += 1

    def _rows_of_one_token(self, plan: StepPlan) -> IntArray:
        """Rows that feed one token: decodes, then chunks of one token, with which swapped-in sequences resume."""
        slots, singles = self.slots, [chunk for chunk in plan.prefills if len(chunk.token_ids) == 1]
        if not singles:
            return self._decode_rows
        rows = np.array([slots.row(chunk.seq_id) for chunk in singles], dtype=np.int64)
        slots.last_tokens[rows] = [chunk.token_ids[0] for chunk in singles]
        slots.positions[rows] = [chunk.start for chunk in singles]
        return np.concatenate((self._decode_rows, rows))

    def _segments(self, chunks: Sequence[PrefillChunk], first_row: int) -> tuple[PrefillSegment, ...]:
        segments = []
        for chunk in chunks:
            context_len = chunk.start + len(chunk.token_ids)
            num_blocks = -(-context_len // self._block_tokens)
            table = self._tensor(self.slots.tables[self.slots.row(chunk.seq_id), :num_blocks])
            segments.append(PrefillSegment(first_row, len(chunk.token_ids), context_len, table))
            first_row += len(chunk.token_ids)
        return tuple(segments)

    def _tensor(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _logits_rows(plan: StepPlan) -> IntArray:
    """The rows of the batch whose logits are sampled, in the order of ``plan.sampled``: the last row of each chunk."""
    ends, single = [], len(plan.decodes)
    row = single + sum(len(chunk.token_ids) == 1 for chunk in plan.prefills)
    for chunk in plan.prefills:
        is_single = len(chunk.token_ids) == 1
        single, row = (single + 1, row) if is_single else (single, row + len(chunk.token_ids))
        if chunk.samples:
            ends.append((single if is_single else row) - 1)
    return np.concatenate((np.arange(len(plan.decodes)), np.array(ends, dtype=np.int64)))
