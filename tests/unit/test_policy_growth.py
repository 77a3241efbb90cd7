"""How many blocks sequences need, in models whose groups of layers have block tables of their own."""

from __future__ import annotations

from random import Random

import pytest

from floodplain.core.cache_groups import CacheGroup, CacheKind, count_blocks, is_one_table
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.growth import blocks_due, blocks_for, count_spare_blocks, full_blocks
from tests.support.views import NEVER, make_view, stream, waiting

FULL, STATE = CacheGroup(4), CacheGroup(64, CacheKind.STATE, 1)
WINDOW = 10
WINDOWED = CacheGroup(2, CacheKind.WINDOW, -(-(WINDOW - 1) // 2) + 1)


def held(group: CacheGroup, num_tokens: int, num_new: int) -> int:
    """Blocks of a table from the first one that the first of the new tokens sees, to the last token's."""
    first = max(0, num_tokens - num_new - WINDOW + 1) // group.block_tokens if group is WINDOWED else 0
    return -(-num_tokens // group.block_tokens) - first


@pytest.mark.parametrize("num_new", [1, 2, 5, 16])
def test_a_window_holds_at_most_what_is_counted(num_new: int) -> None:
    excess = [WINDOWED.count_blocks(n, num_new) - held(WINDOWED, n, num_new) for n in range(num_new, 80)]
    assert min(excess) == 0 and max(excess) <= 2, "a block for each rounding"


@pytest.mark.parametrize("groups", [(FULL, WINDOWED), (WINDOWED, FULL, STATE)])
def test_needs_are_those_of_all_groups(groups: tuple[CacheGroup, ...]) -> None:
    view = make_view(groups=groups)
    for num_tokens in range(1, 80):
        assert blocks_for(view, num_tokens) == count_blocks(groups, num_tokens)
        assert blocks_for(view, num_tokens) == sum(group.count_blocks(num_tokens) for group in groups)
    assert blocks_for(view, 80) < blocks_for(make_view(groups=(FULL, FULL, FULL)), 80), "windows save blocks"


def test_a_stream_grows_by_what_its_groups_lack() -> None:
    view = make_view(groups=(FULL, WINDOWED))
    rng = Random(1)
    for _ in range(200):
        num_tokens, num_steps = rng.randrange(8, 70), rng.randrange(0, 30)
        row = stream(0, num_scheduled=num_tokens, since_step=100, block_due_step=100, end_step=NEVER)
        assert blocks_due(view, row, num_steps) == max(
            0, blocks_for(view, num_tokens + num_steps) - blocks_for(view, num_tokens)
        )
    old = stream(0, num_scheduled=30, since_step=90, block_due_step=100)
    assert blocks_due(view, old, 8) == blocks_for(view, 48) - blocks_for(view, 40), (
        "it has grown since its row was made"
    )
    late = stream(0, num_scheduled=70, since_step=100, block_due_step=120)
    assert blocks_due(view, late, 20) == 0 < blocks_due(view, late, 21)


def test_only_blocks_of_full_attention_can_be_backed_up_ahead() -> None:
    assert full_blocks(make_view(), 15) == 3
    assert full_blocks(make_view(groups=(FULL, WINDOWED, FULL)), 15) == 6
    assert full_blocks(make_view(groups=(WINDOWED, STATE)), 15) == 0


def test_spare_blocks_count_growth_in_each_group() -> None:
    rows = [stream(0), waiting(1, num_tokens=8)]
    alone = count_spare_blocks(make_view(*rows, num_available_blocks=40), 4)
    assert count_spare_blocks(make_view(*rows, num_available_blocks=40, groups=(FULL, FULL)), 4) < alone
    many = [stream(number, num_scheduled=16, block_due_step=100) for number in range(4)]
    for num_free in range(8, 20):  # exact, and by the bound of the fast path
        view = make_view(*many, num_available_blocks=num_free, groups=(FULL, FULL))
        assert count_spare_blocks(view, 4) <= num_free - sum(blocks_due(view, row, 4) for row in many)


def test_fcfs_admits_by_the_blocks_of_all_groups() -> None:
    """A prompt of 24 tokens takes six blocks in one table, and six and six beside a window."""
    row = waiting(0, num_tokens=24)
    for num_free, groups, admits in [(6, (), True), (11, (FULL, WINDOWED), False), (12, (FULL, WINDOWED), True)]:
        view = make_view(row, num_available_blocks=num_free, groups=groups)
        assert bool(FcfsPolicy().decide(view, 0.0, Random(0)).admissions) == admits


def test_one_table_is_one_group_of_full_attention() -> None:
    assert is_one_table((FULL,))
    assert not is_one_table((WINDOWED,)) and not is_one_table((FULL, FULL)) and not is_one_table(())
