"""Cuts of merged groups against all cuts there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.group_sizes import MergeCut, cut_merge
from tests.support.examples import examples

Held = tuple[list[range], int]


@st.composite
def members(draw: st.DrawFn) -> Held:
    """Any adjacent layers of each member, or the layers of existing groups."""
    num_layers = draw(st.integers(2, 8))
    if draw(st.booleans()):
        bounds = draw(
            st.lists(st.tuples(st.integers(0, num_layers), st.integers(0, num_layers)), min_size=2, max_size=4)
        )
        return [range(min(pair), max(pair)) for pair in bounds], num_layers
    held: list[range] = []
    while len(held) < 2:
        ends = sorted(draw(st.sets(st.integers(1, num_layers - 1), max_size=3 - len(held))))
        held += [range(*pair) for pair in pairwise([0, *ends, num_layers])]
    return held[:4], num_layers


def all_cuts(held: Sequence[range], num_layers: int) -> Iterator[list[tuple[int, range]]]:
    for order in permutations(range(len(held))):
        for ends in combinations(range(1, num_layers), len(held) - 1):
            cut = [(one, range(*pair)) for one, pair in zip(order, pairwise([0, *ends, num_layers]), strict=True)]
            if all({*part} <= {*held[one]} for one, part in cut):
                yield cut


def is_right(story: Held, cut: MergeCut | None) -> bool:
    """The oracle: whether it is one of all cuts, and none is more even."""
    possible = list(all_cuts(*story))
    if cut is None or not possible:
        return cut is None and not possible
    sizes = [max(len(part) for _, part in one) for one in possible]
    return [*zip(cut.order, cut.kept, strict=True)] in possible and cut.most_layers == min(sizes)


@settings(max_examples=examples(150), deadline=None)
@given(story=members())
def test_members_keep_some_of_their_layers_as_evenly_as_can_be(story: Held) -> None:
    assert is_right(story, cut_merge(*story))


def test_members_of_equal_halves_take_turns() -> None:
    halves = [range(6), range(6, 12)]
    cut = cut_merge(halves + halves, 12)
    assert cut == MergeCut((0, 2, 1, 3), (range(3), range(3, 6), range(6, 9), range(9, 12)))
    assert cut_merge([*halves, range(12)], 12) == MergeCut((0, 2, 1), (range(4), range(4, 8), range(8, 12)))


def test_too_few_layers_give_no_cut() -> None:
    assert cut_merge([range(1), range(1, 2), range(1), range(1, 2)], 2) is None


def test_an_uneven_cut_and_one_that_is_missed_are_noticed() -> None:
    story = [range(4), range(4, 8), range(8)], 8
    assert is_right(story, cut_merge(*story))
    assert not is_right(story, MergeCut((0, 1, 2), (range(4), range(4, 7), range(7, 8))))
    assert not is_right(story, MergeCut((1, 2, 0), (range(3), range(3, 6), range(6, 8))))
    assert not is_right(story, None)
