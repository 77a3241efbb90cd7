"""A decoder: a stem that embeds tokens, a plain loop over layers, and a head that gives logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from floodplain.core.errors import InvariantError
from floodplain.model.attention.backend import AttentionBackend, AttentionPlan
from floodplain.model.batch import ForwardBatch
from floodplain.model.network.config import ModelConfig
from floodplain.model.network.linear import Projection
from floodplain.model.network.parameters import ParameterBuffer
from floodplain.model.network.rope import Rotation


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers share in one forward pass: attention, the rotation (None: learned positions), KV slots."""

    attention: AttentionPlan
    turn: Rotation | None
    slots: torch.Tensor


class Layer(Protocol):
    """One decoder layer."""

    def __call__(self, x: torch.Tensor, step: Step, kv: torch.Tensor) -> torch.Tensor:
        """Activations [T, hidden] in, activations out; the tokens' keys and values go into ``kv``."""


class Stem(Protocol):
    """The parts before the first layer and after the last."""

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """Activations [T, hidden] of the tokens."""

    def rotation(self, positions: torch.Tensor) -> Rotation | None:
        """The rotation that layers apply at these positions; None if there is none."""

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        """The final norm."""


class LayerHooks(Protocol):
    """Called around each layer, so that its KV or parameters may be elsewhere at other times."""

    def before_layer(self, index: int) -> None:
        """Layer ``index`` runs next: ``kv_layers[index]`` and its parameters are read after this returns."""

    def after_layer(self, index: int) -> None:
        """The work of layer ``index`` has been issued (on CUDA it may still run)."""


class Decoder:
    """A loaded model. It holds only parameters; batches and KV are arguments.

    ``layer_buffers``: each held layer's parameters, which may be unmapped and refilled; empty if packed for the CPU.
    ``held``: the loaded layers: all, or those of a pipeline stage.
    """

    def __init__(
        self,
        config: ModelConfig,
        stem: Stem,
        layers: Mapping[int, Layer],
        head: Projection,
        attention: AttentionBackend,
        *,
        dtype: torch.dtype,
        device: torch.device,
        layer_buffers: Sequence[ParameterBuffer],
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.layer_buffers = list(layer_buffers)
        self._stem = stem
        self.held = range(min(layers), max(layers) + 1)
        self._layers = dict(layers)
        self._head = head
        self._attention = attention

    @property
    def num_layers(self) -> int:
        """The number of layers of the whole model."""
        return self.config.shape.num_layers

    def part(self, layers: range) -> Decoder:
        """The model with some of its layers, sharing parameters; InvariantError if a layer was not loaded."""
        if not layers or layers.start < self.held.start or layers.stop > self.held.stop:
            raise InvariantError(f"layers {layers} are not among the loaded {self.held}")
        first = self.held.start
        return Decoder(
            self.config,
            self._stem,
            {index: self._layers[index] for index in layers},
            self._head,
            self._attention,
            dtype=self.dtype,
            device=self.device,
            layer_buffers=self.layer_buffers[layers.start - first : layers.stop - first],
        )

    def forward(
        self, batch: ForwardBatch, kv_layers: Sequence[torch.Tensor], hooks: LayerHooks | None = None
    ) -> torch.Tensor:
        """Run one step; returns logits [S, vocab] in float32 of ``batch.logits_rows``, and writes the batch's slots.

        ``kv_layers`` has [num_blocks, 2, block_tokens, kv_heads, head_dim] for each layer.
        """
        x = self.run_layers(range(self.num_layers), batch, self.embed(batch), kv_layers, hooks)
        return self.finish(batch, x)

    @torch.inference_mode()
    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """Activations [T, hidden] of the tokens: the input of layer 0."""
        return self._stem.embed(batch)

    @torch.inference_mode()
    def run_layers(
        self,
        layers: range,
        batch: ForwardBatch,
        x: torch.Tensor,
        kv_layers: Sequence[torch.Tensor],
        hooks: LayerHooks | None = None,
    ) -> torch.Tensor:
        """Run adjacent layers, in order. Consecutive stages give bitwise the result of the whole.

        ``x`` and the result are activations [T, hidden]. Each stage gets the same whole batch; of ``kv_layers`` only
        these layers' are used. Raises InvariantError if the parameters of a layer are not loaded.
        """
        plan, turn = self._attention.plan(batch, self.dtype), self._stem.rotation(batch.positions)
        step = Step(plan, turn, batch.slot_mapping)
        for index in layers:
            if hooks is not None:
                hooks.before_layer(index)
            self._expect_parameters(index)
            x = self._layers[index](x, step, kv_layers[index])
            if hooks is not None:
                hooks.after_layer(index)
        return x

    @torch.inference_mode()
    def finish(self, batch: ForwardBatch, x: torch.Tensor) -> torch.Tensor:
        """Logits [S, vocab] in float32 of ``batch.logits_rows``, from the last layer's activations [T, hidden]."""
        return self.logits_of(x[batch.logits_rows])

    @torch.inference_mode()
    def logits_of(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocab] in float32 of some of the last layer's activations, [N, hidden]."""
        logits: torch.Tensor = self._head(self._stem.finish(x)).float()
        return logits

    def _expect_parameters(self, index: int) -> None:
        """Raise if the layer cannot run: unmapped memory would end the process, unfilled memory gives nonsense."""
        if index not in self.held:
            raise InvariantError(f"layer {index} is to run, and only layers {self.held} were loaded")
        if self.layer_buffers and not self.layer_buffers[index - self.held.start].is_filled:
            raise InvariantError(f"layer {index} is to run, and its parameters are not there")
