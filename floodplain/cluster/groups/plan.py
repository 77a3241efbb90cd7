"""The router's plan of one group: its members, the division of layers and blocks, and the contents of orders."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from floodplain.cluster.state.request_table import Entry
from floodplain.cluster.wire import group_messages as wire
from floodplain.cluster.wire.messages import InstanceFacts
from floodplain.cluster.wire.stage_link import SECRET_BYTES
from floodplain.core.errors import InvariantError
from floodplain.core.group_sizes import GroupSizes, HeldRow, MemberReport, Merge, no_merge, size_group
from floodplain.core.tiers import find_slot
from floodplain.cost.model_shape import ModelShape
from floodplain.cost.pipeline import StageMemory, head_layers, split_layers
from floodplain.engine.config import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class MovingRequest:
    """A request at the member ``place``, the KV of whose ``num_computed`` leading tokens moves between members.

    ``blocks`` have the group's ids; each of ``sources`` is the same block, or a swap slot (``core.tiers``).
    """

    entry: Entry
    num_computed: int
    place: int
    blocks: tuple[int, ...]
    sources: tuple[int, ...]


@dataclass(eq=False, slots=True)
class GroupPlan:
    """The router's plan of one group.

    Attributes:
        epochs: Of its members, by place; ``names``: their names in commands.
        since_s: When its state, or the progress in it, changed last.
        begun_s: When the current change, a drop or a restore, was requested.
        reports: Each paused member's report and its blocks, by epoch.
        merge: How it takes in old groups; None before ``divide`` if there are none.
        kept: Layers that each place keeps, and ``sizes``: quanta of the group; empty and None before ``divide``.
        moving: Requests whose KV moves, by the table's numbers.
        moves: The leader's plan of a shrink: how many blocks move, and the integers of ``Move``.
        secret: The secret that members show each other, hexadecimal.
    """

    number: int
    epochs: tuple[int, ...]
    max_model_len: int
    since_s: float
    begun_s: float
    merge: Merge | None = None
    reports: dict[int, tuple[wire.Prepared, tuple[int, ...]]] = field(default_factory=dict)
    kept: tuple[range, ...] = ()
    sizes: GroupSizes | None = None
    moving: dict[int, MovingRequest] = field(default_factory=dict)
    moves: tuple[int, tuple[int, ...]] = (0, ())
    names: tuple[str, ...] = ()
    secret: str = field(default_factory=lambda: secrets.token_hex(SECRET_BYTES))

    @property
    def most_quanta(self) -> int:
        """Quanta of the settled group: the most that a member may name."""
        return self._expect_sizes().num_settled_quanta

    def name_of(self, epoch: int) -> str:
        """The name of a member in commands."""
        return dict(zip(self.epochs, self.names, strict=True))[epoch]

    def report_of(self, place: int) -> wire.Prepared:
        """The report of the paused member of a place."""
        return self.reports[self.epochs[place]][0]

    @property
    def num_own_blocks(self) -> int:
        """Blocks of all members' own pools together."""
        reports = [self.report_of(place) for place in range(len(self.epochs))]
        return sum(
            one.num_kv_pages // (one.quantum_pages * len(one.param_pages)) * one.quantum_blocks for one in reports
        )

    def count_blocks(self, num_quanta: int) -> int:
        """Blocks in ``num_quanta`` quanta."""
        return num_quanta * self.report_of(0).quantum_blocks

    def divide(self, shape: ModelShape, facts: InstanceFacts, entries: Mapping[int, Mapping[int, Entry]]) -> None:
        """Divide the layers, and choose the movable requests that keep their KV: the oldest, as far as there is room.

        ``facts`` may be any member's. ``entries`` are requests on members, by epoch and ticket. Raises ``UserError`` if
        there are fewer layers than members.
        """
        reports = [self.report_of(place) for place in range(len(self.epochs))]
        layer_block_bytes = 2 * shape.kv_size * DTYPE_BYTES[facts.dtype] * facts.block_tokens
        memories = [_memory_of(one, layer_block_bytes) for one in reports]
        merge = self.merge or no_merge(split_layers(shape.num_layers, memories, head_layers(shape)), shape.num_layers)
        self.merge, self.kept = merge, merge.kept
        found = [
            (entry, HeldRow(place, blocks), row.num_computed)
            for place, epoch in enumerate(self.epochs)
            for row, blocks in wire.split_blocks(self.reports[epoch][0].rows, self.reports[epoch][1])
            if blocks and (entry := find_movable(entries[epoch], row)) is not None
        ]
        found.sort(key=lambda one: (one[0].request.priority, one[0].number))
        quantum_blocks = reports[0].quantum_blocks
        members = [
            MemberReport(
                one.num_kv_pages, one.quantum_pages, _most_quanta(one), one.param_pages, merge.held[place],
                None if merge.holders[place] == place else merge.holders[place],
            )
            for place, one in enumerate(reports)
        ]  # fmt: skip
        self.sizes = size_group(members, self.kept, [row for _, row, _ in found], quantum_blocks)
        for entry, row, num_computed in (found[index] for index in self.sizes.kept_rows):
            blocks = self.sizes.map_blocks(row, quantum_blocks)
            pairs = zip(row.sources, blocks, strict=True)
            sources = tuple(block if find_slot(source) is None else source for source, block in pairs)
            self.moving[entry.number] = MovingRequest(entry, num_computed, row.place, blocks, sources)

    def find_copiers(self) -> dict[int, frozenset[int]]:
        """For each moving request: epochs of members that lack layers of it. Its own member copies swapped blocks."""
        copiers, holders = {}, self._expect_merge().holders
        for request, one in self.moving.items():
            is_swapped = one.sources != one.blocks
            pairs = zip(self.epochs, holders, strict=True)
            copiers[request] = frozenset(epoch for epoch, holder in pairs if is_swapped or holder != one.place)
        return copiers

    def choose_homes(self, is_wanted: Callable[[Entry], bool]) -> dict[int, int]:
        """For each moving request that is wanted: the member with the fewest blocks assigned so far."""
        counts, homes = dict.fromkeys(self.epochs, 0), {}
        for request, one in self.moving.items():
            if is_wanted(one.entry):
                homes[request] = min(counts, key=lambda epoch: (counts[epoch], epoch))
                counts[homes[request]] += len(one.blocks)
        return homes

    # -- messages ------------------------------------------------------------------------------------------------------

    def message(self, order: wire.Order) -> tuple[wire.GroupOrder, tuple[int, ...]]:
        """The message of an order, and the integers beside it. ``ADOPT`` orders are built by the caller."""
        epoch, number = order.epoch, order.number
        kind: Any = order.kind
        match kind:
            case wire.Prepare | wire.Cancel | wire.Commit | wire.Close:
                return kind(epoch, number), ()
            case wire.Settle | wire.Grow:
                return kind(epoch, number, self.most_quanta), ()
            case wire.Plan:
                return wire.Plan(epoch, number, self._expect_sizes().num_restore_quanta), ()
            case wire.Drop:
                return self._drop(epoch)
            case wire.Fetch:
                held, blocks = self._held(order.requests)
                addresses = tuple(self.report_of(place).bulk_address for place in range(len(self.epochs)))
                sources = [source for request in order.requests for source in self.moving[request].sources]
                return wire.Fetch(epoch, number, addresses, self._expect_merge().sources, held), (*blocks, *sources)
            case wire.Release:
                return wire.Release(epoch, number, order.requests[0]), ()
            case wire.Move:
                return wire.Move(epoch, number, self.moves[0]), self.moves[1]
            case wire.Return:
                return wire.Return(epoch, number), self._used_quanta()
            case wire.Fill:
                return wire.Fill(epoch, number, self._addresses_of_layers()), ()
            case wire.Collect:
                held, blocks = self._held(order.requests)
                return wire.Collect(epoch, number, self._addresses_of_layers(), held), blocks
        raise InvariantError(f"the order {kind.__name__} is no message of a plan")

    def _drop(self, epoch: int) -> tuple[wire.Drop, tuple[int, ...]]:
        place, sizes = self.epochs.index(epoch), self._expect_sizes()
        following = self.report_of((place + 1) % len(self.epochs))
        held, blocks = self._held(tuple(self.moving)) if place == 0 else ((), ())
        order = wire.Drop(
            epoch=epoch,
            number=self.number,
            place=place,
            num_members=len(self.epochs),
            first_layer=self.kept[place].start,
            end_layer=self.kept[place].stop,
            num_used=len(sizes.used[place]),
            first_quantum=sizes.first[place],
            num_quanta=sizes.num_quanta,
            max_model_len=self.max_model_len,
            secret=self.secret,
            host=following.host,
            port=following.port,
            held=held,
        )
        return order, (*sizes.used[place], *blocks)

    def _held(self, requests: Sequence[int]) -> tuple[tuple[wire.HeldRequest, ...], tuple[int, ...]]:
        found = [(request, self.moving[request]) for request in requests]
        held = tuple(wire.HeldRequest(request, one.place, len(one.blocks)) for request, one in found)
        return held, tuple(block for _, one in found for block in one.blocks)

    def _addresses_of_layers(self) -> tuple[str, ...]:
        places = [place for place, layers in enumerate(self.kept) for _ in layers]
        return tuple(self.report_of(place).bulk_address for place in places)

    def _used_quanta(self) -> tuple[int, ...]:
        quantum_blocks = self.report_of(0).quantum_blocks
        return tuple(sorted({block // quantum_blocks for one in self.moving.values() for block in one.blocks}))

    def _expect_merge(self) -> Merge:
        if self.merge is None:
            raise InvariantError(f"group {self.number} is not divided yet")
        return self.merge

    def _expect_sizes(self) -> GroupSizes:
        if self.sizes is None:
            raise InvariantError(f"group {self.number} is not divided yet")
        return self.sizes


def find_movable(entries: Mapping[int, Entry], row: wire.KvRow) -> Entry | None:
    """The request of a member's row, if its KV may move: all its tokens are known, and it is no suspect.

    A suspect waits for an instance without another one. ``entries`` are the member's requests, by ticket.
    """
    entry = entries.get(row.ticket)
    return None if entry is None or entry.num_tokens != row.num_tokens or entry.is_suspect else entry


def _memory_of(report: wire.Prepared, layer_block_bytes: int) -> StageMemory:
    page_bytes = report.quantum_blocks * layer_block_bytes // report.quantum_pages
    num_pages, layer_pages = report.num_kv_pages + sum(report.param_pages), max(report.param_pages)
    return StageMemory(num_pages * page_bytes, layer_pages * page_bytes, layer_block_bytes)


def _most_quanta(report: wire.Prepared) -> int:
    """Most quanta that a member can have addresses for: all its pages behind a single kept layer."""
    return (report.num_kv_pages + sum(report.param_pages)) // report.quantum_pages
