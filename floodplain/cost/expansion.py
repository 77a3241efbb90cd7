"""Costs and gains of streaming layers of the KV cache: a closed form, and the stall of one step. Pure.

A decode step takes T = (W + K) / H: it reads all weights (W bytes) and the batch's KV (K) at the memory's bandwidth H.
With a full pool of ``a`` bytes and the *expansion* e, K = e a. Streamed layers load their part of K over a link of
bandwidth L = rho H. The best expansion makes both equally long: with more, compute waits for copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from floodplain.core.layer_places import LayerPlaces, every_place

Path = tuple[int, int]
"""A chain of dependent work: (number of layers that compute, number of layers that are copied)."""


def best_expansion(weight_bytes: float, pool_bytes: float, link_ratio: float) -> float:
    """e* = (1 + rho W / a) / (1 - rho), for slots without memory and divisible layers; inf if rho is 1 or more.

    Args:
        weight_bytes: W: weights that one step reads.
        pool_bytes: a: device memory of the KV pool.
        link_ratio: rho: bandwidth of the link over that of the device's memory.
    """
    if link_ratio >= 1:
        return float("inf")
    return (1 + link_ratio * weight_bytes / pool_bytes) / (1 - link_ratio)


def expansion_gain(expansion: float, weight_bytes: float, pool_bytes: float) -> float:
    """Tokens per second relative to no expansion, if load fills both pools and no step waits for a copy.

    g = e (W/a + 1) / (W/a + e): e times the batch, in steps that read e times the KV and the same weights.
    """
    ratio = weight_bytes / pool_bytes
    return expansion * (ratio + 1) / (ratio + expansion)


def best_places(num_layers: int, weight_bytes: float, pool_bytes: float, link_ratio: float) -> LayerPlaces:
    """The closed form, ``best_expansion``, with slots (whose memory is part of the pool's) and whole layers."""
    best = LayerPlaces(num_layers)
    for places in every_place(num_layers):
        kv_bytes = places.expansion * pool_bytes
        if places.num_streamed / num_layers * kv_bytes <= link_ratio * (weight_bytes + kv_bytes):
            best = places
    return best


def step_stall_s(places: LayerPlaces, step_s: float, copy_s: float) -> float:
    """Seconds for which compute waits in a step of ``step_s`` without stalls, if one layer loads in ``copy_s``.

    Assumes that all layers compute equally long, and that the link loads one layer at a time. Loads begin when the step
    begins, so the first streamed layers overlap only with the layers before them.
    """
    num_layers = places.num_layers
    layer_s = step_s / num_layers
    longest_s = 0.0
    for computed, copied in critical_paths(places):  # hot loop of a review: no generator, no call
        path_s = (computed - num_layers) * layer_s + copied * copy_s
        if path_s > longest_s:
            longest_s = path_s
    return longest_s


@lru_cache(maxsize=1024)
def critical_paths(places: LayerPlaces) -> tuple[Path, ...]:
    """The chains of one step that can be the longest, depending on the times of layers and copies.

    A load starts after the load before it, and after the last use of its slot; a layer computes after the layer before
    it, and after its load. The first chain has all layers and no copy.
    """
    start: tuple[Path, ...] = ((0, 0),)
    computed, loaded = start, start
    used: list[tuple[Path, ...]] = []  # until each streamed layer has computed
    num_computed = 0
    for turn, layer in enumerate(places.streamed):
        is_free = used[turn - places.num_slots] if turn >= places.num_slots else start
        loaded = _longer(_longest(loaded, is_free), num_copied=1)
        before = _longer(computed, num_computed=layer - num_computed)
        computed = _longer(_longest(before, loaded), num_computed=1)
        num_computed = layer + 1
        used.append(computed)
    return _longer(computed, num_computed=places.num_layers - num_computed)


def _longer(paths: Iterable[Path], num_computed: int = 0, num_copied: int = 0) -> tuple[Path, ...]:
    return tuple((computed + num_computed, copied + num_copied) for computed, copied in paths)


def _longest(some: Iterable[Path], others: Iterable[Path]) -> tuple[Path, ...]:
    """The paths that are longest for some ratio of the two durations: a convex hull, by rising copies."""
    kept: list[Path] = []
    for path in sorted({*some, *others}, key=lambda path: (path[1], path[0])):
        while kept and kept[-1][0] <= path[0]:
            kept.pop()
        while len(kept) > 1 and _is_inside(kept[-2], kept[-1], path):
            kept.pop()
        kept.append(path)
    return tuple(kept)


def _is_inside(fewer: Path, path: Path, more: Path) -> bool:
    """Whether ``path`` is longer than both of its neighbours for no ratio of the two durations."""
    return (more[1] - fewer[1]) * (path[0] - fewer[0]) <= (more[0] - fewer[0]) * (path[1] - fewer[1])
