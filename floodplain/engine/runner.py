"""Executes step plans with a real model: plan in, tokens out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from floodplain.core.errors import InvariantError
from floodplain.core.plan import PrefillChunk, StepPlan, StepResult, Transfer
from floodplain.core.request import SeqId
from floodplain.core.sampling import SamplingParams
from floodplain.core.tiers import CopyTime, Direction
from floodplain.engine.slots import IntArray, SequenceSlots
from floodplain.memory.layer_slots import LayerSlots, find_read_blocks
from floodplain.memory.swap_space import SwapSpace
from floodplain.model.batch import ForwardBatch, PrefillSegment
from floodplain.model.network.decoder import Decoder
from floodplain.model.sampler import Sampler


class ModelRunner:
    """An ``Executor`` over a model and its KV.

    Args:
        model: Loaded parameters.
        kv_layers: The KV of each layer, [num_blocks, 2, block_tokens, kv_heads, head_dim].
        sampler: Chooses tokens.
        swap: Runs the transfers of plans; the runner closes it.
        block_tokens: Tokens in a block.
        max_model_len: Most tokens of a sequence.
        on_close: Gives back the memory behind ``kv_layers``.
        layer_slots: Layers of ``kv_layers`` stream through these; the runner closes them. None: no layer ever does.
    """

    def __init__(
        self,
        model: Decoder,
        kv_layers: Sequence[torch.Tensor],
        sampler: Sampler,
        swap: SwapSpace,
        *,
        block_tokens: int,
        max_model_len: int,
        on_close: Callable[[], None],
        layer_slots: LayerSlots | None = None,
    ) -> None:
        self._model = model
        self._kv_layers = kv_layers if layer_slots is None else layer_slots
        self._sampler = sampler
        self._block_tokens = block_tokens
        self._on_close = on_close
        self._swap = swap
        self._layer_slots = layer_slots
        self._slots = SequenceSlots(max_blocks=-(-max_model_len // block_tokens))
        self._params: dict[SeqId, SamplingParams] = {}
        self._decodes: tuple[SeqId, ...] = ()
        self._decode_rows: IntArray = np.zeros(0, dtype=np.int64)
        self._sampled: tuple[SeqId, ...] = ()
        self._sampled_rows: IntArray = self._decode_rows
        self._sampled_params: list[SamplingParams] = []
        self._results: deque[StepResult] = deque()
        self._is_closed = False

    def close(self) -> None:
        """Give back all memory."""
        if not self._is_closed:
            self._is_closed = True
            try:
                self._swap.close()  # its copies end before the pool's memory goes
                if self._layer_slots is not None:
                    self._layer_slots.close()
            finally:
                self._kv_layers = ()
                del self._model  # views of parameters, whose memory goes next
                self._on_close()

    def poll_transfers(self) -> Sequence[tuple[int, Sequence[int]]]:
        """See ``Executor``."""
        return self._swap.poll()

    def wait_transfers(self, timeout_s: float) -> Sequence[tuple[int, Sequence[int]]]:
        """See ``Executor``."""
        return self._swap.wait(timeout_s)

    def take_copy_times(self) -> Sequence[CopyTime]:
        """See ``Executor``."""
        return self._swap.take_copy_times()

    def submit(self, plan: StepPlan) -> None:
        """See ``Executor``. The step has run when this returns."""
        self._results.append(self.execute(plan))

    def collect(self) -> StepResult:
        """See ``Executor``."""
        return self._results.popleft()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step to its end. Its transfers begin first and run beside it; nobody waits for them here.

        Raises:
            InvariantError: The plan moves KV to swap space that is not there, or the runner is closed.
        """
        if self._is_closed:
            raise InvariantError("a plan reached a closed model runner")
        self._apply_updates(plan)
        self._start_transfers(plan.transfers)
        batch = self._make_batch(plan)
        if batch is None:
            return StepResult(plan.step_id, ())
        logits = self._model.forward(batch, self._kv_layers, self._layer_slots)
        if not plan.sampled and logits.is_cuda:
            # No token is waited for: without this the step would seem to take no longer than its launch.
            torch.cuda.current_stream(logits.device).synchronize()
        return self._sample(plan, logits)

    def _start_transfers(self, transfers: Sequence[Transfer]) -> None:
        """What leaves was written by steps that have ended, or is in the device's queue before its copy."""
        if transfers and self._layer_slots is not None:
            self._layer_slots.settle()
            inbound = (transfer for transfer in transfers if transfer.kind.direction is Direction.INBOUND)
            self._layer_slots.near.note_changed([block for transfer in inbound for block in transfer.blocks])
        for transfer in transfers:
            self._swap.start(transfer)

    def _apply_updates(self, plan: StepPlan) -> None:
        for seq_id in plan.released:
            self._slots.release(seq_id)
            self._params.pop(seq_id, None)
        for update in plan.tables:
            self._slots.update_table(update)
        for chunk in plan.prefills:
            if chunk.request is not None:
                if chunk.seq_id not in self._params:  # admitted again after a preemption, it goes on counting
                    row = self._slots.row(chunk.seq_id)
                    self._slots.num_generated[row] = len(chunk.request.known_token_ids)
                self._params[chunk.seq_id] = chunk.request.params
        if plan.decodes is not self._decodes:
            self._decodes = plan.decodes
            self._decode_rows = self._slots.rows(plan.decodes)

    # -- the batch -------------------------------------------------------------------------------------------------

    def _make_batch(self, plan: StepPlan) -> ForwardBatch | None:
        """Decodes first, then the chunks; all arithmetic on arrays. None if the plan computes nothing."""
        slots, block_tokens = self._slots, self._block_tokens
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
        if self._layer_slots is not None:
            self._begin_loads(rows, runs, slot_mapping)
        return ForwardBatch(
            token_ids=self._tensor(np.concatenate(token_ids)),
            positions=self._tensor(position),
            slot_mapping=self._tensor(slot_mapping),
            block_tables=self._tensor(slots.tables[rows, : -(-max_context // block_tokens)]),
            context_lens=self._tensor(positions + 1),
            max_context_len=max_context,
            prefills=self._segments(runs, len(rows)),
            logits_rows=self._tensor(_logits_rows(plan)),
        )

    def _begin_loads(self, rows: IntArray, runs: Sequence[PrefillChunk], slot_mapping: IntArray) -> None:
        """What the step reads of streamed layers: what lies before the tokens that it feeds."""
        assert self._layer_slots is not None
        slots = self._slots
        all_rows = np.concatenate((rows, np.array([slots.row(chunk.seq_id) for chunk in runs], dtype=np.int64)))
        lengths = np.concatenate((slots.positions[rows], np.array([chunk.start for chunk in runs], dtype=np.int64)))
        num_columns = -(-int(lengths.max(initial=0)) // self._block_tokens)
        tables = slots.tables[all_rows, :num_columns]
        self._layer_slots.begin_step(find_read_blocks(tables, lengths, self._block_tokens), slot_mapping)

    def _rows_of_one_token(self, plan: StepPlan) -> IntArray:
        """Rows that feed one token: the decodes, then the chunks of one token, which are decodes in all but name.

        Whoever comes back from swap space computes such a chunk: many in each step when turns are taken.
        """
        slots, singles = self._slots, [chunk for chunk in plan.prefills if len(chunk.token_ids) == 1]
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
            table = self._tensor(self._slots.tables[self._slots.row(chunk.seq_id), :num_blocks])
            segments.append(PrefillSegment(first_row, len(chunk.token_ids), context_len, table))
            first_row += len(chunk.token_ids)
        return tuple(segments)

    def _tensor(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._model.device, non_blocking=True)

    # -- sampling --------------------------------------------------------------------------------------------------

    def _sample(self, plan: StepPlan, logits: torch.Tensor) -> StepResult:
        slots, sampled = self._slots, plan.sampled
        slots.positions[self._decode_rows] += 1
        for chunk in plan.prefills:
            slots.positions[slots.row(chunk.seq_id)] = chunk.start + len(chunk.token_ids)
        if sampled != self._sampled:
            self._sampled = sampled
            self._sampled_rows = slots.rows(sampled)
            self._sampled_params = [self._params[seq_id] for seq_id in sampled]
        rows = self._sampled_rows
        tokens, logprobs = self._sampler.sample(
            logits, self._sampled_params, slots.positions[rows], slots.num_generated[rows]
        )
        slots.last_tokens[rows] = tokens
        slots.num_generated[rows] += 1
        return StepResult(plan.step_id, tokens.tolist(), dict(zip(sampled, logprobs, strict=True)) if logprobs else {})


def _logits_rows(plan: StepPlan) -> IntArray:
    """The rows of the batch whose logits are sampled, in the order of ``plan.sampled``.

    Chunks of one token stand behind the decodes, longer ones behind those; of a chunk its last row counts.
    """
    ends, single = [], len(plan.decodes)
    row = single + sum(len(chunk.token_ids) == 1 for chunk in plan.prefills)
    for chunk in plan.prefills:
        is_single = len(chunk.token_ids) == 1
        single, row = (single + 1, row) if is_single else (single, row + len(chunk.token_ids))
        if chunk.samples:
            ends.append((single if is_single else row) - 1)
    return np.concatenate((np.arange(len(plan.decodes)), np.array(ends, dtype=np.int64)))
