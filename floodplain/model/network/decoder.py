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
    """What all layers share in one forward pass: attention, the rotation (None: learned positions), where KV goes."""

    attention: AttentionPlan
    turn: Rotation | None
    slots: torch.Tensor


class Layer(Protocol):
    """One decoder layer."""

    def __call__(self, x: torch.Tensor, step: Step, kv: torch.Tensor) -> torch.Tensor:
        """Activations [T, hidden] in, activations out; the tokens' keys and values go into ``kv``."""
        ...


class Stem(Protocol):
    """What stands before the first layer and after the last."""

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """Activations [T, hidden] of the tokens."""
        ...

    def rotation(self, positions: torch.Tensor) -> Rotation | None:
        """The rotation that layers apply at these positions, if any."""
        ...

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        """The final norm."""
        ...


class LayerHooks(Protocol):
    """Called around each layer, so that its KV or its parameters may be elsewhere until then."""

    def before_layer(self, index: int) -> None:
        """Layer ``index`` runs next: ``kv_layers[index]`` and its parameters are read after this returns."""
        ...

    def after_layer(self, index: int) -> None:
        """The work of layer ``index`` has been issued (on CUDA it may still run)."""
        ...


class Decoder:
    """A loaded model. It holds parameters only; batches and KV are arguments.

    Attributes:
        config: What it is.
        dtype: Of parameters, activations and KV.
        device: Where it runs.
        layer_buffers: Each layer's parameters, which may go and come back at a boundary; empty when they were packed
            for the CPU. Of a stage: those of its layers alone.
        held: The layers that were loaded: all, or those of a stage of a pipeline.
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
        """Layers of the whole model."""
        return self.config.shape.num_layers

    def part(self, layers: range) -> Decoder:
        """The same model with some of its layers, as a stage of a pipeline has them; parameters are shared.

        Raises:
            InvariantError: A layer was not loaded.
        """
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
        """Run one step: ``embed``, all of ``run_layers``, ``finish``.

        Args:
            batch: Its tokens.
            kv_layers: One [num_blocks, 2, block_tokens, kv_heads, head_dim] for each layer; the batch's slots are
                written.
            hooks: Called around each layer.

        Returns:
            Logits [S, vocab] in float32 of ``batch.logits_rows``.
        """
        x = self.run_layers(range(self.num_layers), batch, self.embed(batch), kv_layers, hooks)
        return self.finish(batch, x)

    @torch.inference_mode()
    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """Activations [T, hidden] of the tokens, as layer 0 takes them."""
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
        """Run some layers: a stage of a pipeline, or all. Stages one after the other are the whole, bit by bit.

        Args:
            layers: Adjacent ones, in order.
            batch: Its tokens; the whole of it in each stage.
            x: Activations [T, hidden], as ``embed`` or the layer before gave them.
            kv_layers: See ``forward``; only those of these layers are looked at.
            hooks: Called around each layer.

        Returns:
            Activations [T, hidden] for the next layer, or for ``finish``.

        Raises:
            InvariantError: A layer's parameters are not there when it is to run.
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
        logits: torch.Tensor = self._head(self._stem.finish(x[batch.logits_rows])).float()
        return logits

    def _expect_parameters(self, index: int) -> None:
        """Touching memory that is not there would end the process, and what is not filled computes nonsense."""
        if index not in self.held:
            raise InvariantError(f"layer {index} is to run, and only layers {self.held} were loaded")
        if self.layer_buffers and not self.layer_buffers[index - self.held.start].is_filled:
            raise InvariantError(f"layer {index} is to run, and its parameters are not there")
