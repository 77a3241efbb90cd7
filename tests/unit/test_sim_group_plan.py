"""The plan of a drop in virtual time: what crosses links, which requests keep their KV, and which blocks they get."""

from __future__ import annotations

import pytest

from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.core.tiers import source_of_slot
from floodplain.policy.drop import DropSizes
from floodplain.runtime.handover import Record
from floodplain.sim.group_plan import merge_of, plan_handover

SIZES = DropSizes(num_layers=12, layer_bytes=60_000, block_bytes=1_000)
POOL, TOKEN_BYTES = 60, 12 * 1_000 / 16


def record(number: int, sources: tuple[int, ...]) -> Record:
    params = SamplingParams(max_tokens=10)
    request = Request(request_id=str(number), prompt_token_ids=(1,) * 40, params=params, arrival_s=float(number))
    return Record(request, 16 * len(sources) + 1, 16 * len(sources), sources)


@pytest.mark.parametrize("num_members", [2, 3, 4])
def test_each_member_sends_the_layers_that_others_keep(num_members: int) -> None:
    order, merge = merge_of(range(num_members), {}, SIZES, POOL, head_cost=0.0)
    records = [(place, record(place, (0, 1, 2))) for place in range(num_members)]
    sizes, moves = plan_handover(merge, SIZES, POOL, records, TOKEN_BYTES)
    assert order == tuple(range(num_members)) and sizes.num_settled_quanta == SIZES.group_blocks([POOL] * num_members)
    for place, one in enumerate(moves):
        share = (12 - len(merge.kept[place])) / 12
        assert one.link_bytes == {place: pytest.approx(48 * TOKEN_BYTES * share)}
    blocks = [block for one in moves for block in one.blocks]
    assert len(set(blocks)) == len(blocks) == 3 * num_members and max(blocks) < sizes.num_quanta


def test_in_a_merge_members_fetch_what_they_lack_from_the_member_that_has_it() -> None:
    halves = (range(6), range(6, 12))
    order, merge = merge_of((0, 1, 2, 3), {(0, 1): halves, (2, 3): halves}, SIZES, POOL, head_cost=0.0)
    place = order.index(0)
    _, (one,) = plan_handover(merge, SIZES, POOL, [(place, record(0, (5,)))], TOKEN_BYTES)
    quarter = 16 * TOKEN_BYTES / 4
    assert one.link_bytes == {order.index(0): pytest.approx(quarter), order.index(1): pytest.approx(quarter)}


def test_the_oldest_requests_keep_their_kv_and_the_others_compute_it_again() -> None:
    small = DropSizes(num_layers=12, layer_bytes=10_000, block_bytes=1_000)
    _, merge = merge_of((0, 1), {}, small, POOL, head_cost=0.0)
    records = [
        (number % 2, record(number, tuple(range(10 * (number // 2), 10 * (number // 2) + 10)))) for number in range(12)
    ]
    sizes, moves = plan_handover(merge, small, POOL, records, TOKEN_BYTES)
    kept = [bool(one.blocks) for one in moves]
    assert kept == sorted(kept, reverse=True) and any(kept) and not all(kept)
    assert sum(len(one.blocks) for one in moves) <= sizes.num_quanta
    assert all(not one.record.sources and not one.record.num_computed for one in moves if not one.blocks)


def test_kv_in_swap_space_goes_to_others_and_not_over_the_own_link_to_itself() -> None:
    _, merge = merge_of((0, 1), {}, SIZES, POOL, head_cost=0.0)
    _, (one,) = plan_handover(merge, SIZES, POOL, [(1, record(0, (source_of_slot(3),)))], TOKEN_BYTES)
    assert one.link_bytes == {1: pytest.approx(16 * TOKEN_BYTES / 2)} and len(one.blocks) == 1
