"""Sizes of a group's pool against brute force over pages; which requests keep their KV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.errors import InvariantError
from floodplain.core.group_sizes import GroupSizes, HeldRow, MemberReport, MergeCut, cut_merge, size_group
from tests.support.examples import examples

Q = 3  # blocks of a quantum
Story = tuple[list[MemberReport], list[range], list[HeldRow]]


def blocks_of(num_quanta: int) -> st.SearchStrategy[int]:
    return st.integers(0, num_quanta * Q - 1)


@st.composite
def merging(draw: st.DrawFn, reports: list[MemberReport], ends: list[int]) -> list[MemberReport]:
    """Members that have only some layers; some of them are already in one group."""
    merged: list[MemberReport] = []
    for place, report in enumerate(reports):
        alone = [other for other, one in enumerate(merged) if one.holder is None]
        held = range(draw(st.integers(0, ends[place])), draw(st.integers(ends[place + 1], ends[-1])))
        merged.append(replace(report, held=held, holder=draw(st.sampled_from([None, *alone]))))
    return merged


@st.composite
def stories(draw: st.DrawFn) -> Story:
    num_members = draw(st.integers(2, 4))
    counts = [draw(st.integers(1, 3)) for _ in range(num_members)]
    ends = [sum(counts[:place]) for place in range(num_members + 1)]
    quantum_pages, num_layers = draw(st.integers(1, 3)), ends[-1]
    quanta = [draw(st.integers(1, 9)) for _ in range(num_members)]
    reports = [
        MemberReport(
            num_kv_pages=size * num_layers * quantum_pages,
            quantum_pages=quantum_pages,
            max_quanta=draw(st.integers(size, 40)),
            param_pages=tuple(draw(st.lists(st.integers(0, 9), min_size=num_layers, max_size=num_layers))),
        )
        for size in quanta
    ]
    if draw(st.booleans()):
        reports = draw(merging(reports, ends))
    holders = sorted({place if one.holder is None else one.holder for place, one in enumerate(reports)})
    places = draw(st.lists(st.sampled_from(holders), max_size=12))
    slots = st.lists(st.integers(-6, -1), max_size=draw(st.sampled_from([0, 4])), unique=True)
    rows = [
        HeldRow(place, tuple(draw(slots) + draw(st.lists(blocks_of(quanta[place]), max_size=5, unique=True))))
        for place in places
    ]
    return reports, [range(begin, end) for begin, end in pairwise(ends)], rows


class Pages:
    """The oracle: pages of one member by their content; more than its total is an error."""

    def __init__(self, report: MemberReport) -> None:
        self.report, self.held = report, dict[tuple[str, int, int], int]()
        self.total = report.num_kv_pages + sum(report.param_pages)
        self.map_params(range(len(report.param_pages)))

    def map_params(self, layers: Sequence[int]) -> None:
        for layer in layers:
            self.held["param", layer, 0] = self.report.param_pages[layer]

    def map(self, what: str, layers: Sequence[int], quanta: Sequence[int]) -> None:
        assert all(quantum < self.report.max_quanta for quantum in quanta), "no address space"
        self.held |= {(what, layer, quantum): self.report.quantum_pages for layer in layers for quantum in quanta}

    def unmap(self, what: str, layers: Sequence[int]) -> None:
        self.held = {key: num for key, num in self.held.items() if key[0] != what or key[1] not in layers}

    @property
    def is_overdrawn(self) -> bool:
        return sum(self.held.values()) > self.total


def hold_exchange(report: MemberReport, kept: range, used: Sequence[int], num_quanta: int) -> Pages:
    pages, others = Pages(report), [layer for layer in range(len(report.param_pages)) if layer not in kept]
    pages.unmap("param", others)
    pages.map("own", [layer for layer in others if report.held is None or layer in report.held], used)
    pages.map("group", kept, range(num_quanta))
    return pages


def run(report: MemberReport, kept: range, used: Sequence[int], sizes: GroupSizes) -> bool:
    """Return whether a member's pages suffice in every state of a group, from drop to return."""
    num_layers = len(report.param_pages)
    others = [layer for layer in range(num_layers) if layer not in kept]
    pages = hold_exchange(report, kept, used, sizes.num_quanta)
    ok = not pages.is_overdrawn
    pages.unmap("own", others)
    pages.map("group", kept, range(sizes.num_settled_quanta))
    ok = ok and not pages.is_overdrawn
    pages.unmap("group", kept)
    pages.map("group", kept, range(sizes.num_restore_quanta))
    pages.map_params(others)
    ok = ok and not pages.is_overdrawn
    num_own = count_returned_quanta(report, kept, sizes.num_restore_quanta)
    pages.map("own", range(num_layers), range(num_own))
    ok = ok and not pages.is_overdrawn
    pages.unmap("group", kept)
    pages.map("own", range(num_layers), range(report.num_kv_pages // (num_layers * report.quantum_pages)))
    return ok and not pages.is_overdrawn


def is_least(reports: list[MemberReport], kept: list[range], used: Sequence[Sequence[int]], num_quanta: int) -> bool:
    """Return whether the size is maximal: for some member, one more quantum exceeds its pages or its limit."""
    more = [
        hold_exchange(*one, num_quanta)
        for one in zip(reports, kept, used, strict=True)
        if num_quanta < one[0].max_quanta
    ]
    return len(more) < len(reports) or any(
        pages.is_overdrawn or sum(pages.held.values()) + len(part) * report.quantum_pages > pages.total
        for pages, report, part in zip(more, reports, kept, strict=True)
    )


def quanta_of(rows: Sequence[HeldRow], reports: Sequence[MemberReport]) -> list[list[int]]:
    """The oracle: used quanta of each place, from its own rows or from those of its holder."""
    holders = [place if one.holder is None else one.holder for place, one in enumerate(reports)]
    used = [{b // Q for row in rows if row.place == holder for b in row.sources if b >= 0} for holder in holders]
    return list(map(sorted, used))


def count_used(used: Sequence[Sequence[int]], reports: Sequence[MemberReport]) -> int:
    return sum(len(quanta) for quanta, one in zip(used, reports, strict=True) if one.holder is None)


def slots_of(rows: Sequence[HeldRow]) -> set[tuple[int, int]]:
    return {(row.place, source) for row in rows for source in row.sources if source < 0}


def fits(reports: list[MemberReport], kept: list[range], rows: Sequence[HeldRow]) -> bool:
    """The oracle: whether the group's pool holds used quanta and blocks for slots before any KV has left."""
    used = quanta_of(rows, reports)
    num = count_used(used, reports) + len(range(0, len(slots_of(rows)), Q))
    if any(num > report.max_quanta for report in reports):
        return False
    members = zip(reports, kept, used, strict=True)
    return not any(hold_exchange(report, part, own, num).is_overdrawn for report, part, own in members)


@settings(max_examples=examples(150), deadline=None)
def count_returned_quanta(report: MemberReport, kept: range, num_group_quanta: int) -> int:
    """Return the quanta of all layers that a member can have beside ``num_group_quanta`` in the kept layers."""
    num_pages = report.num_kv_pages - num_group_quanta * len(kept) * report.quantum_pages
    if num_pages < 0:
        raise InvariantError(f"{num_group_quanta} quanta of a group have no pages beside all parameters")
    return num_pages // (len(report.param_pages) * report.quantum_pages)


@given(story=stories())
def test_pages_are_never_overdrawn_and_none_is_left_for_one_more(story: Story) -> None:
    reports, kept, rows = story
    sizes = size_group(reports, kept, rows, Q)
    for report, part, used in zip(reports, kept, sizes.used, strict=True):
        assert run(report, part, used, sizes)
    assert is_least(reports, kept, sizes.used, sizes.num_quanta)
    num_used = count_used(sizes.used, reports)
    assert sizes.num_settled_quanta >= sizes.num_quanta >= num_used
    assert len(sizes.slot_blocks) <= (sizes.num_quanta - num_used) * Q


@settings(max_examples=examples(150), deadline=None)
@given(story=stories())
def test_oldest_requests_keep_their_kv_and_younger_ones_if_it_fits_beside(story: Story) -> None:
    reports, kept, rows = story
    sizes = size_group(reports, kept, rows, Q)
    wanted: list[HeldRow] = []
    for index, row in enumerate(rows):
        does_fit = fits(reports, kept, [*wanted, row])
        assert does_fit == (index in sizes.kept_rows)
        wanted += [row] if does_fit else []
    assert list(map(list, sizes.used)) == quanta_of(wanted, reports)


@settings(max_examples=examples(150), deadline=None)
@given(story=stories())
def test_blocks_keep_their_pages_under_new_ids(story: Story) -> None:
    """Group ids are unique per block; blocks of a quantum stay together, in order."""
    reports, kept, rows = story
    sizes = size_group(reports, kept, rows, Q)
    new: dict[tuple[int, int], int] = {}
    for row in (rows[index] for index in sizes.kept_rows):
        new |= zip([(row.place, source) for source in row.sources], sizes.map_blocks(row, Q), strict=True)
    assert len(set(new.values())) == len(new)
    assert all(0 <= block < sizes.num_quanta * Q for block in new.values())
    whole = {(place, old // Q, block // Q) for (place, old), block in new.items() if old >= 0}
    assert len({one[:2] for one in whole}) == len(whole) == len({one[2] for one in whole})
    assert all(old % Q == block % Q for (_, old), block in new.items() if old >= 0)
    swapped, num_used = slots_of([rows[index] for index in sizes.kept_rows]), count_used(sizes.used, reports)
    assert sorted(new[one] for one in swapped) == list(range(num_used * Q, num_used * Q + len(swapped)))


def test_blocks_of_a_request_that_gave_its_kv_up_have_no_new_ids() -> None:
    sizes = GroupSizes((0,), ((0, 2), ()), (0, 2), 9, 9, 9)
    assert sizes.map_blocks(HeldRow(0, (7, 0)), 3) == (4, 0)
    with pytest.raises(InvariantError):
        sizes.map_blocks(HeldRow(0, (3,)), 3)


@pytest.mark.parametrize(
    "kept", [[range(2)], [range(2), range(3, 4)], [range(4), range(4, 4)], [range(2), range(1, 4)]]
)
def test_a_cut_that_is_none_is_refused(kept: list[range]) -> None:
    report = MemberReport(40, 1, 99, (5, 5, 5, 5))
    with pytest.raises(InvariantError, match="do not cut"):
        size_group([report, report], kept, [], Q)


def test_full_pools_keep_two_thirds_when_parameters_are_small() -> None:
    report = MemberReport(num_kv_pages=4 * 90, quantum_pages=1, max_quanta=999, param_pages=(0,) * 4)
    rows = [HeldRow(place, tuple(range(Q * n, Q * n + Q))) for n in range(90) for place in (0, 1)]
    assert len(size_group([report, report], [range(2), range(2, 4)], rows, Q).kept_rows) == 120


# -- negative controls -------------------------------------------------------------------------------------------------


def test_one_quantum_more_is_noticed() -> None:
    report = MemberReport(num_kv_pages=40, quantum_pages=1, max_quanta=99, param_pages=(5, 5, 5, 5))
    rows = [HeldRow(0, (0, Q))]
    kept = [range(2), range(2, 4)]
    sizes = size_group([report, report], kept, rows, Q)
    assert run(report, kept[0], sizes.used[0], sizes)
    for name in ("num_quanta", "num_settled_quanta", "num_restore_quanta"):
        grown = {field: getattr(sizes, field) for field in GroupSizes.__slots__} | {name: getattr(sizes, name) + 1}
        try:
            assert not run(report, kept[0], sizes.used[0], GroupSizes(**grown)), name
        except InvariantError:
            assert name == "num_restore_quanta"


# -- cuts of merged groups against all cuts there are ------------------------------------------------------------------


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
