"""Cuts the layers of merged groups: which member keeps which of the layers that it has. Pure.

A member that has dropped layers has no parameters of them, so it can only keep some of those that it has. For two
groups of two equal halves each, the members alternate: first of A, first of B, second of A, second of B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations


@dataclass(frozen=True, slots=True)
class MergeCut:
    """Members in the order of the pipeline.

    Attributes:
        order: Indices of the members, by place.
        kept: Adjacent layers of each, by place: together all layers, none twice, none empty.
    """

    order: tuple[int, ...]
    kept: tuple[range, ...]

    @property
    def most_layers(self) -> int:
        """Layers of the member that keeps the most: its KV limits the group's."""
        return max(map(len, self.kept))


def cut_merge(held: Sequence[range], num_layers: int) -> MergeCut | None:
    """The first cut that minimizes the most layers of any member; None if no cut exists.

    Args:
        held: Adjacent layers that each member has now.
        num_layers: Of the model.
    """
    best: MergeCut | None = None
    for order in permutations(range(len(held))):
        kept = _cut_in_order([held[member] for member in order], num_layers)
        if kept is not None and (best is None or max(map(len, kept)) < best.most_layers):
            best = MergeCut(order, kept)
    return best


def _cut_in_order(held: Sequence[range], num_layers: int) -> tuple[range, ...] | None:
    """The best cut in one order, by dynamic programming over leading layers and members; None without one."""
    best: dict[int, tuple[int, tuple[range, ...]]] = {0: (0, ())}
    for layers in held:
        cuts: dict[int, tuple[int, tuple[range, ...]]] = {}
        for begin, (most, kept) in best.items():
            for end in range(begin + 1, layers.stop + 1) if begin >= layers.start else ():
                size = max(most, end - begin)
                if end not in cuts or size < cuts[end][0]:
                    cuts[end] = size, (*kept, range(begin, end))
        best = cuts
    return best[num_layers][1] if num_layers in best else None
