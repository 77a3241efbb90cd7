"""The plan of a drop in virtual time, by the router's rules: layers, blocks, and KV that crosses links. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from floodplain.core.group_sizes import GroupSizes, HeldRow, MemberReport, Merge, no_merge, plan_merge, size_group
from floodplain.cost.pipeline import StageMemory, split_layers
from floodplain.policy.drop import DropSizes
from floodplain.runtime.handover import Record


@dataclass(frozen=True, slots=True)
class Moving:
    """A request between two engines.

    Attributes:
        record: Its tokens; without ``sources`` its KV is computed again.
        blocks: Of the new engine, which get its KV.
        link_bytes: KV that each member's link carries, by place.
    """

    record: Record
    blocks: tuple[int, ...] = ()
    link_bytes: Mapping[int, float] = field(default_factory=dict)


def merge_of(
    instances: Sequence[int],
    old: Mapping[tuple[int, ...], Sequence[range]],
    sizes: DropSizes,
    num_blocks: int,
    head_cost: float,
) -> tuple[tuple[int, ...], Merge]:
    """(instances in the order of the pipeline, which layers they keep).

    Args:
        old: Members of each group that is taken in, and the layers of each; UserError if layers cannot be shared.
        sizes: Of layers and blocks.
        num_blocks: Pool of an instance that has all layers.
        head_cost: Work of the last stage beside its layers, in layers.
    """
    if old:
        return plan_merge(instances, old, sizes.num_layers)
    num_bytes = sizes.num_layers * (num_blocks * sizes.block_bytes + sizes.layer_bytes)
    memories = [StageMemory(num_bytes, sizes.layer_bytes, sizes.block_bytes)] * len(instances)
    return tuple(instances), no_merge(split_layers(sizes.num_layers, memories, head_cost), sizes.num_layers)


def plan_handover(
    merge: Merge, sizes: DropSizes, num_blocks: int, records: Sequence[tuple[int, Record]], token_bytes: float
) -> tuple[GroupSizes, list[Moving]]:
    """(sizes of the group's pool, the requests in the order of ``records``).

    The oldest requests keep their KV as far as there is room while it exists twice.

    Args:
        merge: Which layers members keep.
        num_blocks: Pool of an instance that has all layers.
        records: (place of the member that holds it, record) of each request.
        token_bytes: KV of a token in all layers.
    """
    with_kv = [index for index, (_, record) in enumerate(records) if record.sources]
    with_kv.sort(key=lambda index: (records[index][1].request.priority, records[index][1].request.arrival_s))
    rows = [HeldRow(records[index][0], records[index][1].sources) for index in with_kv]
    group = size_group(_reports(merge, sizes, num_blocks), merge.kept, rows, quantum_blocks=1)
    found = {with_kv[place]: group.map_blocks(rows[place], 1) for place in group.kept_rows}
    moves = []
    for index, (place, record) in enumerate(records):
        if index in found:
            moves.append(Moving(record, found[index], _link_bytes(merge, place, record, token_bytes)))
        else:
            moves.append(Moving(without_kv(record)))
    return group, moves


def without_kv(record: Record) -> Record:
    """The record of a request that computes all of its tokens again."""
    return Record(record.request, record.num_tokens, 0, ())


def _reports(merge: Merge, sizes: DropSizes, num_blocks: int) -> list[MemberReport]:
    num_kv_pages = num_blocks * sizes.num_layers
    param_pages = (sizes.layer_bytes // sizes.block_bytes,) * sizes.num_layers
    most_quanta = num_kv_pages + sum(param_pages)
    return [
        MemberReport(num_kv_pages, 1, most_quanta, param_pages, held, None if holder == place else holder)
        for place, (held, holder) in enumerate(zip(merge.held, merge.holders, strict=True))
    ]


def _link_bytes(merge: Merge, home: int, record: Record, token_bytes: float) -> dict[int, float]:
    """KV that each member sends to others: of the layers that they keep and did not have."""
    num_layers: Counter[int] = Counter()
    for place, kept in enumerate(merge.kept):
        num_layers.update(source for layer in kept if (source := merge.sources[home][layer]) != place)
    total = len(merge.sources[home])
    return {place: record.num_computed * token_bytes * count / total for place, count in num_layers.items()}
