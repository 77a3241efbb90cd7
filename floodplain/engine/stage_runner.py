"""Runs step plans through the layers of one stage of a pipeline: activations in, activations or tokens out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from floodplain.core.errors import InvariantError
from floodplain.core.plan import StepPlan, StepResult
from floodplain.engine.batches import Batches
from floodplain.engine.runner import sample_step
from floodplain.model.network.decoder import Decoder
from floodplain.model.sampler import Sampler


class StageRunner:
    """One stage of a pipeline. All stages run all plans, in the same order, over KV of their own layers.

    Args:
        model: The layers of the stage.
        kv_layers: KV by the index of a layer in the whole model; only that of the stage's layers is read.
        sampler: Chooses tokens, in the last stage.
        block_tokens: Tokens in a block.
        max_model_len: Most tokens of a sequence.
    """

    def __init__(
        self,
        model: Decoder,
        kv_layers: Sequence[torch.Tensor],
        sampler: Sampler,
        *,
        block_tokens: int,
        max_model_len: int,
    ) -> None:
        self._model = model
        self._kv_layers = kv_layers
        self._sampler = sampler
        self._batches = Batches(model.device, block_tokens=block_tokens, max_model_len=max_model_len)

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self._model.held.start == 0

    @property
    def is_last(self) -> bool:
        """Whether it samples."""
        return self._model.held.stop == self._model.num_layers

    def run(self, plan: StepPlan, x: torch.Tensor | None) -> torch.Tensor | StepResult:
        """Run the next plan.

        Args:
            plan: In stages behind the first, token ids of chunks are ignored.
            x: Activations [T, hidden] from the stage before; None in the first.

        Returns:
            Activations [T, hidden] for the next stage; the tokens, if it is the last.

        Raises:
            InvariantError: The plan computes nothing, or activations are missing.
        """
        self._batches.apply(plan)
        made = self._batches.make(plan)
        if made is None or (x is None) != self.is_first:
            raise InvariantError(f"step {plan.step_id} has nothing to run in layers {self._model.held}")
        batch, _ = made
        x = self._model.embed(batch) if x is None else x.to(self._model.device)
        x = self._model.run_layers(self._model.held, batch, x, self._kv_layers)
        self._batches.advance(plan)
        if not self.is_last:
            return x
        return sample_step(plan, self._model.finish(batch, x), self._batches, self._sampler)

    def take_tokens(self, plan: StepPlan, token_ids: Sequence[int]) -> None:
        """Store the tokens that the last stage sampled, as the next inputs of the first stage."""
        rows, _ = self._batches.sampled(plan)
        self._batches.take_tokens(rows, np.array(token_ids, dtype=np.int64))
