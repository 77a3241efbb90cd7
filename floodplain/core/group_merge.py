"""Which layers members of a new group keep, and which member has the KV of which layers, if groups are merged. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from floodplain.core.errors import UserError
from floodplain.core.group_sizes import cut_merge


@dataclass(frozen=True, slots=True)
class Merge:
    """The plan of a merge; tuples are indexed by place in the new group.

    Attributes:
        kept: Layers that each member keeps.
        held: Layers that each member has before.
        holders: The place whose report has each member's rows: its old leader's, or its own.
        sources: For each place and layer of the model: the place that has this layer's KV of the place's rows.
    """

    kept: tuple[range, ...]
    held: tuple[range, ...]
    holders: tuple[int, ...]
    sources: tuple[tuple[int, ...], ...]


def plan_merge(
    epochs: Sequence[int], old: Mapping[tuple[int, ...], Sequence[range]], num_layers: int
) -> tuple[tuple[int, ...], Merge]:
    """(epochs in the order of the pipeline, the plan).

    ``epochs`` are in any order. ``old`` has the epochs of each old group, the leader first, and the layers of each of
    its members. Raises ``UserError`` if they cannot share the layers.
    """
    kept_of = {epoch: part for members, kept in old.items() for epoch, part in zip(members, kept, strict=True)}
    held = [kept_of.get(epoch, range(num_layers)) for epoch in epochs]
    cut = cut_merge(held, num_layers)
    if cut is None:
        raise UserError(f"instances {sorted(epochs)} cannot share {num_layers} layers by dropping more: restore first")
    order = tuple(epochs[member] for member in cut.order)
    members_of = {epoch: members for members in old for epoch in members}
    place_of = {epoch: place for place, epoch in enumerate(order)}
    sources = [
        tuple(
            next(
                place_of[one] for one in members_of.get(epoch, (epoch,)) if layer in kept_of.get(one, range(num_layers))
            )
            for layer in range(num_layers)
        )
        for epoch in order
    ]
    return order, Merge(
        kept=cut.kept,
        held=tuple(held[member] for member in cut.order),
        holders=tuple(place_of[members_of.get(epoch, (epoch,))[0]] for epoch in order),
        sources=tuple(sources),
    )


def no_merge(kept: Sequence[range], num_layers: int) -> Merge:
    """The plan of a group of single instances, which have all layers and keep ``kept``."""
    places = tuple(range(len(kept)))
    held = tuple(range(num_layers) for _ in places)
    return Merge(tuple(kept), held, places, tuple((place,) * num_layers for place in places))
