"""Which page is mapped where when an instance drops layers: pure arithmetic over pages, layers and quanta."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from floodplain.core.errors import InvariantError
from floodplain.memory.arena import Page

LayerPages = Mapping[int, Mapping[int, Sequence[Page]]]
"""Layer to quantum to its pages, in order; the same quanta in each layer."""


@dataclass(frozen=True, slots=True)
class GroupPlaces:
    """Pages by layer and group quantum: of kept layers, of used quanta of others; the rest; the number of all."""

    kept: LayerPages
    leaving: LayerPages
    spare: list[Page]
    num_pages: int


def sort_pages(
    pages: Iterable[Page], layers: Iterable[int], quanta: Sequence[int], quantum_pages: int
) -> dict[int, dict[int, list[Page]]]:
    """Group pages by layer and quantum; they are given layer by layer, in each quantum by quantum."""
    rest = iter(pages)
    return {layer: {q: [next(rest) for _ in range(quantum_pages)] for q in quanta} for layer in layers}


def expect_group(held: LayerPages, used: Sequence[int], kept: range, first_quantum: int, num_quanta: int) -> None:
    """Raise ``InvariantError`` unless held pages can form this group; arguments as in ``GroupMemory.drop``."""
    quanta = {*held[min(held)]}
    if not kept or kept.step != 1 or not {*kept} <= {*held}:
        raise InvariantError(f"layers {kept} are not some of the layers {sorted(held)}")
    if len({*used}) < len(used) or not {*used} <= quanta:
        raise InvariantError(f"used quanta {list(used)} are not some of the quanta {sorted(quanta)}")
    if first_quantum < 0 or first_quantum + len(used) > num_quanta:
        raise InvariantError(f"group quanta {first_quantum}+{len(used)} are outside the {num_quanta} of the group")


def place_pages(
    held: LayerPages,
    free: Sequence[Page],
    used: Sequence[int],
    kept: range,
    first_quantum: int,
    num_quanta: int,
    quantum_pages: int,
) -> GroupPlaces:
    """Pages of used quanta keep their quantum under its group id; the others fill the kept layers.

    ``held`` are pages of the KV before, ``free`` further ones; the rest is as in ``GroupMemory.drop``. Raises
    ``InvariantError`` if pages are too few.
    """
    at = {quantum: first_quantum + k for k, quantum in enumerate(used)}
    unused = [page for pages in held.values() for quantum in pages if quantum not in at for page in pages[quantum]]
    spare = sorted([*free, *unused])
    others = [quantum for quantum in range(num_quanta) if not 0 <= quantum - first_quantum < len(used)]
    num_wanted = len(kept) * len(others) * quantum_pages
    if num_wanted > len(spare):
        raise InvariantError(f"{len(spare)} free pages, and {num_wanted} are wanted for {num_quanta} group quanta")
    moved = {layer: {at[quantum]: pages[quantum] for quantum in used} for layer, pages in held.items()}
    new = sort_pages(spare[:num_wanted], kept, others, quantum_pages)
    return GroupPlaces(
        kept={layer: {**moved[layer], **new[layer]} for layer in kept},
        leaving={layer: pages for layer, pages in moved.items() if layer not in kept and used},
        spare=spare[num_wanted:],
        num_pages=len(spare) + len(held) * len(used) * quantum_pages,
    )
