"""Sizes of a group's KV pool in each state, which requests keep their KV in a drop, and which layers members keep.

Member i has T pages behind its own pool, keeps k of L layers, and frees P pages by dropping the parameters of the
others; a quantum is q pages in each layer. While grouped, it has T + P pages for KV.

- Exchange: N quanta of k layers, beside U used quanta whose KV in the dropped layers has not left yet:
  N*k*q + U*(L-k)*q <= T + P.
- Settled: that KV is gone: N*k*q <= T + P.
- Restore: P pages must be spare for the parameters: N*k*q <= T.
- Return: beside N quanta of k layers there are quanta of all L layers again: N*k*q + R*L*q <= T.

A block has one id in all members, so the group has the least number over its members.

KV in swap space has no pages yet. It gets blocks behind the last used quantum, as many as the exchange has room for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, permutations

from floodplain.core.errors import InvariantError, UserError
from floodplain.core.tiers import find_slot


@dataclass(frozen=True, slots=True)
class MemberReport:
    """A paused member's report of its memory.

    Attributes:
        num_kv_pages: Pages behind its KV pool, over all layers.
        quantum_pages: Pages of a whole quantum in one layer.
        max_quanta: Quanta for which address space is reserved.
        param_pages: Pages that dropping the parameters of each layer frees.
        held: Layers that it has now; None: all.
        holder: In a merge of groups, the place that holds its group's rows (it has the same quanta in its own layers).
    """

    num_kv_pages: int
    quantum_pages: int
    max_quanta: int
    param_pages: tuple[int, ...]
    held: range | None = None
    holder: int | None = None

    @property
    def num_held_layers(self) -> int:
        """Layers in which its used quanta have pages."""
        return len(self.param_pages) if self.held is None else len(self.held)

    def count_grouped_pages(self, kept: range) -> int:
        """Pages for KV after it has dropped the parameters of all layers but ``kept``."""
        return self.num_kv_pages + sum(self.param_pages) - sum(self.param_pages[layer] for layer in kept)


@dataclass(frozen=True, slots=True)
class HeldRow:
    """A request that the member at ``place`` of the group holds, and where its blocks lie there.

    ``sources`` (``core.tiers``): blocks of the member's pool, slots of its swap space; shared by rows of one prefix.
    """

    place: int
    sources: tuple[int, ...]

    @property
    def blocks(self) -> tuple[int, ...]:
        """The sources that are blocks of the member's own pool."""
        return tuple(source for source in self.sources if find_slot(source) is None)

    @property
    def slots(self) -> tuple[tuple[int, int], ...]:
        """(place, slot) of the sources in swap space."""
        return tuple((self.place, slot) for source in self.sources if (slot := find_slot(source)) is not None)


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """The plan of a drop.

    Attributes:
        kept_rows: Indices of the rows that keep their KV, ascending; the others are recomputed.
        used: For each place, quanta of the member's pool that hold KV of these rows, ascending. The k-th one becomes
            quantum ``first[place] + k`` of the group. Places with one holder have the same.
        first: For each place, the first of the group's quanta that are its used ones.
        num_quanta: Quanta of the group's pool during the exchange, and
        num_settled_quanta: after it.
        num_restore_quanta: Most quanta of the pool with which the dropped parameters can be mapped again.
        slot_blocks: The group's block for each (place, slot) of swap space that holds KV of these rows.
    """

    kept_rows: tuple[int, ...]
    used: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    num_quanta: int
    num_settled_quanta: int
    num_restore_quanta: int
    slot_blocks: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def map_blocks(self, row: HeldRow, quantum_blocks: int) -> tuple[int, ...]:
        """The group's blocks for the sources of a row that keeps its KV, in order. Shared blocks stay shared."""
        mapped = iter(map_blocks(row.blocks, self.used[row.place], self.first[row.place], quantum_blocks))
        slots = ((row.place, find_slot(source)) for source in row.sources)
        return tuple(next(mapped) if slot is None else self.slot_blocks[place, slot] for place, slot in slots)


def count_exchange_quanta(report: MemberReport, kept: range, num_used: int) -> int:
    """Quanta that a member can map in its kept layers beside ``num_used`` not yet copied ones; may be negative."""
    num_leaving = num_used * (report.num_held_layers - len(kept)) * report.quantum_pages
    num_pages = report.count_grouped_pages(kept) - num_leaving
    return min(report.max_quanta, num_pages // (len(kept) * report.quantum_pages))


def count_settled_quanta(report: MemberReport, kept: range) -> int:
    """Quanta that a member can map in its kept layers when nothing else is mapped but their parameters."""
    return count_exchange_quanta(report, kept, 0)


def count_restore_quanta(report: MemberReport, kept: range) -> int:
    """The most quanta in the kept layers beside the parameters of all layers."""
    return min(report.max_quanta, report.num_kv_pages // (len(kept) * report.quantum_pages))


def size_group(
    reports: Sequence[MemberReport], kept: Sequence[range], rows: Sequence[HeldRow], quantum_blocks: int
) -> GroupSizes:
    """Plan a drop; InvariantError if ``kept`` is no cut of all layers.

    Args:
        reports: Of the members, by place.
        kept: Layers that each of them keeps: together all, in order, none twice, none empty.
        rows: Requests that members hold, of all members, oldest first, each at the place of its holder.
        quantum_blocks: Blocks of a quantum, alike in all members.
    """
    _check_cut(reports, kept)
    kept_rows, used = choose_kept_rows(reports, kept, rows, quantum_blocks)
    slots = dict.fromkeys(slot for index in kept_rows for slot in rows[index].slots)
    holders = _holders_of(reports)
    sizes = [len(quanta) if place == holder else 0 for place, quanta, holder in zip(count(), used, holders)]
    end = sum(sizes) * quantum_blocks
    return GroupSizes(
        kept_rows=kept_rows,
        used=used,
        first=tuple(sum(sizes[:holder]) for holder in holders),
        num_quanta=min(map(count_exchange_quanta, reports, kept, map(len, used))),
        num_settled_quanta=min(map(count_settled_quanta, reports, kept)),
        num_restore_quanta=min(map(count_restore_quanta, reports, kept)),
        slot_blocks={slot: end + index for index, slot in enumerate(slots)},
    )


def choose_kept_rows(
    reports: Sequence[MemberReport], kept: Sequence[range], rows: Sequence[HeldRow], quantum_blocks: int
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """(indices of the rows that keep their KV, quanta of each place that hold it), for ``size_group``.

    From the oldest on, each row keeps its KV if it fits beside that of earlier rows: the group's pool needs room for
    all used quanta, and behind them a block for each slot. Pages move as whole quanta.
    """
    used: dict[int, set[int]] = {holder: set() for holder in _holders_of(reports)}
    by_place = [used[holder] for holder in _holders_of(reports)]
    slots: set[tuple[int, int]] = set()
    kept_rows = []
    for index, row in enumerate(rows):
        new = {block // quantum_blocks for block in row.blocks} - used[row.place]
        new_slots = {*row.slots} - slots
        used[row.place] |= new
        num_quanta = sum(map(len, used.values())) + -(-(len(slots) + len(new_slots)) // quantum_blocks)
        if num_quanta > min(map(count_exchange_quanta, reports, kept, map(len, by_place))):
            used[row.place] -= new
            continue
        slots |= new_slots
        kept_rows.append(index)
    return tuple(kept_rows), tuple(tuple(sorted(quanta)) for quanta in by_place)


def _holders_of(reports: Sequence[MemberReport]) -> list[int]:
    return [place if report.holder is None else report.holder for place, report in enumerate(reports)]


def map_blocks(blocks: Sequence[int], used: Sequence[int], first: int, quantum_blocks: int) -> tuple[int, ...]:
    """The group's ids of blocks of a member's ``used`` quanta, from quantum ``first`` on; else InvariantError."""
    places = {quantum: (first + index) * quantum_blocks for index, quantum in enumerate(used)}
    if not {block // quantum_blocks for block in blocks} <= places.keys():
        raise InvariantError("a block is in a quantum that no request keeps")
    return tuple(places[block // quantum_blocks] + block % quantum_blocks for block in blocks)


def _check_cut(reports: Sequence[MemberReport], kept: Sequence[range]) -> None:
    sizes = {len(report.param_pages) for report in reports}
    layers = [layer for part in kept for layer in part]
    if len(reports) != len(kept) or sizes != {len(layers)} or layers != list(range(len(layers))) or not all(kept):
        raise InvariantError(f"{list(kept)} do not cut the layers of {len(reports)} members")
    for report, part in zip(reports, kept, strict=True):
        if report.held is not None and not {*part} <= {*report.held}:
            raise InvariantError(f"layers {part} are to be kept by a member that has {report.held}")


@dataclass(frozen=True, slots=True)
class MergeCut:
    """Members in the order of the pipeline (``order``, by index), and the adjacent layers that each keeps, by place."""

    order: tuple[int, ...]
    kept: tuple[range, ...]

    @property
    def most_layers(self) -> int:
        """Layers of the member that keeps the most: its KV limits the group's."""
        return max(map(len, self.kept))


def cut_merge(held: Sequence[range], num_layers: int) -> MergeCut | None:
    """Cut the layers of merged groups: the first cut that minimizes the most layers of any member; None without one.

    A member can only keep some of the layers that it has (``held``). For two groups of two equal halves each, the
    members alternate: first of A, first of B, second of A, second of B.
    """
    best: MergeCut | None = None
    for order in permutations(range(len(held))):
        kept = _cut_in_order([held[member] for member in order], num_layers)
        if kept is not None and (best is None or max(map(len, kept)) < best.most_layers):
            best = MergeCut(order, kept)
    return best


def _cut_in_order(held: Sequence[range], num_layers: int) -> tuple[range, ...] | None:
    """Dynamic programming over leading layers and members, for one order; None without a cut."""
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
