"""Loads of layers ahead with one fault each, which a law must find."""

from __future__ import annotations

from tests.support.layer_steps import AheadLayers, LayerCopy, LayerWork


class WaitsForNoLoad(AheadLayers):
    """A layer computes during its load."""

    def _await_layer(self, layer: int, work: LayerWork) -> None:
        pass


class LoadsOverWrites(AheadLayers):
    """A slot is loaded while its last layer's rows are still written through from it."""

    def _writes_before(self, slot: int) -> tuple[LayerCopy, ...]:
        return ()


class WritesNothing(AheadLayers):
    """New rows are not written through."""

    def _write_through(self, layer: int, work: LayerWork) -> None:
        pass


class LoadsAtOnce(AheadLayers):
    """All layers are loaded when the step begins, whether their slots are free or not."""

    def _begin_step(self, work: LayerWork) -> None:
        for layer in self.places.streamed:
            self._load(layer, work)
