"""Executes step plans with a real model: plan in, tokens out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from floodplain.core.errors import InvariantError
from floodplain.core.plan import NO_TOKEN, StepPlan, StepResult, Transfer
from floodplain.core.tiers import Direction
from floodplain.engine.batches import Batches, BatchRows
from floodplain.memory.layer_slots import LayerSlots, find_read_blocks
from floodplain.memory.swap_space import SwapSpace
from floodplain.model.network.decoder import Decoder
from floodplain.model.sampler import Sampler
from floodplain.model.structure import Grammars


class ModelRunner:
    """Runs step plans on a whole model and its KV, one at a time (an ``Executor``). ``close`` closes its parts.

    Args:
        stage: The only stage.
        on_close: Frees the memory of the model and its KV.
    """

    def __init__(self, stage: StageRunner, swap: SwapSpace, on_close: Callable[[], None]) -> None:
        self._stage, self._swap, self._on_close = stage, swap, on_close
        self._layer_slots = stage.layer_slots
        self._results: deque[StepResult] = deque()
        self._is_closed = False

    def close(self) -> None:
        """Free all memory."""
        if not self._is_closed:
            self._is_closed = True
            try:
                self._swap.close()  # its copies end before the pool's memory is freed
                if self._layer_slots is not None:
                    self._layer_slots.close()
            finally:
                del self._stage  # it has views of parameters and KV, whose memory is freed next
                self._on_close()

    def submit(self, plan: StepPlan) -> None:
        """Run a plan; its result waits for ``collect``. The step has run when this returns."""
        self._results.append(self.execute(plan))

    def collect(self) -> StepResult:
        """The result of the oldest submitted plan that was not collected."""
        return self._results.popleft()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step to its end. Its transfers begin first and run beside it; they may end after the step."""
        if self._is_closed:
            raise InvariantError("a plan reached a closed model runner")
        self._start_transfers(plan.transfers)
        if not plan.decodes and not plan.prefills:
            self._stage.apply(plan)
            return StepResult(plan.step_id, ())
        result = self._stage.run(plan, None)
        assert isinstance(result, StepResult)
        return result

    def _start_transfers(self, transfers: Sequence[Transfer]) -> None:
        """Start a plan's copies; steps that wrote outbound blocks have ended or are queued before them."""
        if transfers and self._layer_slots is not None:
            self._layer_slots.settle()
            inbound = (transfer for transfer in transfers if transfer.kind.direction is Direction.INBOUND)
            self._layer_slots.near.note_changed([block for transfer in inbound for block in transfer.blocks])
        for transfer in transfers:
            self._swap.start(transfer)


class StageRunner:
    """One stage of a pipeline, or a whole model. All stages run all plans, in the same order, over KV of their layers.

    Args:
        kv_layers: The KV by a layer's number in the whole model, [num_blocks, 2, block_tokens, kv_heads, head_dim];
            only entries of the stage's layers are read.
        layer_slots: Slots for streamed layers of ``kv_layers``; None: no layer ever streams.
    """

    def __init__(
        self,
        model: Decoder,
        kv_layers: Sequence[torch.Tensor],
        sampler: Sampler,
        *,
        block_tokens: int,
        max_model_len: int,
        grammars: Grammars | None = None,
        layer_slots: LayerSlots | None = None,
    ) -> None:
        self.layer_slots = layer_slots
        self._model = model
        self._kv_layers = kv_layers if layer_slots is None else layer_slots
        self._sampler = sampler
        self._block_tokens = block_tokens
        self._batches = Batches(model.device, block_tokens=block_tokens, max_model_len=max_model_len, grammars=grammars)

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self._model.held.start == 0

    @property
    def is_last(self) -> bool:
        """Whether it samples."""
        return self._model.held.stop == self._model.num_layers

    def apply(self, plan: StepPlan) -> None:
        """Apply the releases and tables of a plan that computes nothing."""
        self._batches.apply(plan)

    def run(self, plan: StepPlan, x: torch.Tensor | None) -> torch.Tensor | StepResult:
        """Run the next plan on activations [T, hidden] from the stage before (None in the first stage).

        Returns activations [T, hidden] for the next stage; the tokens, if it is the last. Stages behind the first
        ignore token ids of chunks. Raises InvariantError if the plan computes nothing, or activations are missing.
        """
        self._batches.apply(plan)
        made = self._batches.make(plan)
        if made is None or (x is None) != self.is_first:
            raise InvariantError(f"step {plan.step_id} has nothing to run in layers {self._model.held}")
        batch, rows = made
        if self.layer_slots is not None:
            self._begin_loads(self.layer_slots, rows)
        x = self._model.embed(batch) if x is None else x.to(self._model.device)
        x = self._model.run_layers(self._model.held, batch, x, self._kv_layers, self.layer_slots)
        self._batches.advance(plan)
        return self._sample(plan, self._model.finish(batch, x), x) if self.is_last else x

    def take_tokens(self, plan: StepPlan, token_ids: Sequence[int]) -> None:
        """Store the tokens that the last stage sampled, as the next inputs of the first stage."""
        rows, _, _ = self._batches.sampled(plan)
        self._batches.take_tokens(rows, np.array(token_ids, dtype=np.int64))

    def _begin_loads(self, layer_slots: LayerSlots, step: BatchRows) -> None:
        """Begin to load the blocks of streamed layers that the step reads: those before the tokens that it feeds."""
        slots, runs = self._batches.slots, step.runs
        all_rows = np.concatenate((step.single, np.array([slots.row(chunk.seq_id) for chunk in runs], dtype=np.int64)))
        lengths = np.concatenate(
            (slots.positions[step.single], np.array([chunk.start for chunk in runs], dtype=np.int64))
        )
        num_columns = -(-int(lengths.max(initial=0)) // self._block_tokens)
        tables = slots.tables[all_rows, :num_columns]
        layer_slots.begin_step(find_read_blocks(tables, lengths, self._block_tokens), step.slot_mapping)

    def _sample(self, plan: StepPlan, logits: torch.Tensor, x: torch.Tensor) -> StepResult:
        """Sample the tokens of a step whose positions have advanced, and store them as the next inputs."""
        scores = self._batches.scores.add(plan, x, self._model.logits_of)
        if self.is_first and not plan.sampled and logits.is_cuda:
            # Without a sampled token nothing waits for the device, and the step would seem as short as its launch.
            torch.cuda.current_stream(logits.device).synchronize()
        rows, params, histories = self._batches.sampled(plan)
        slots = self._batches.slots
        tokens, logprobs = self._sampler.sample(
            logits, params, slots.positions[rows], slots.num_generated[rows], histories
        )
        self._batches.take_tokens(rows, tokens)
        for index, history in histories.items():
            if tokens[index] != NO_TOKEN:
                history.extend((int(tokens[index]),))
        named = dict(zip(plan.sampled, logprobs, strict=True)) if logprobs else {}
        for lost in np.flatnonzero(tokens == NO_TOKEN):
            named.pop(plan.sampled[lost], None)
            scores.pop(plan.sampled[lost], None)
        return StepResult(plan.step_id, tokens.tolist(), named, scores)
