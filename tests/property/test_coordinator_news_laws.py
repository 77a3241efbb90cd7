"""The marks of news: a member that sends its last mark gets all news since that mark."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.coordinator.news import NewsMarks
from floodplain.leases.states import OWED, Lease, LeaseId, LeaseState, concerned

NAMES = [f"m{i}" for i in range(6)]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("note"), st.sets(st.sampled_from(NAMES), min_size=1, max_size=2)),
        st.tuples(st.just("ask"), st.sampled_from(NAMES)),
        st.tuples(st.just("restart"), st.none()),
    ),
    max_size=40,
)  # fmt: skip


def run(steps: list[tuple[str, object]], make: Callable[[], NewsMarks]) -> list[str]:
    """Return the members that had news and got the reply that there was none."""
    marks, held, unheard, missed = make(), dict.fromkeys(NAMES, ""), set(NAMES), list[str]()
    for kind, what in steps:
        if kind == "note":
            assert isinstance(what, set)
            marks.note(what)
            unheard |= what
        elif kind == "ask":
            assert isinstance(what, str)
            if what in unheard and not marks.has_news(what, held[what]):
                missed.append(what)
            unheard.discard(what)
            held[what] = marks.mark
        else:
            marks, unheard = make(), set(NAMES)  # the next coordinator may have granted and recalled in between
    return missed


@given(STEPS, st.integers(1, len(NAMES)))
def test_no_news_is_missed_however_few_names_are_remembered(steps: list[tuple[str, object]], most_names: int) -> None:
    assert run(steps, lambda: NewsMarks(most_names)) == []


@given(st.lists(st.sampled_from(NAMES), max_size=20))
def test_a_member_at_the_latest_mark_has_no_news_until_the_next_note(asked: list[str]) -> None:
    marks = NewsMarks()
    marks.note({"m0"})
    held = marks.mark
    for name in asked:
        assert not marks.has_news(name, held)
    marks.note({"m0"})
    assert marks.has_news("m0", held)
    assert not marks.has_news("m1", held)


class Forgetful(NewsMarks):
    """Negative control: drops names, and the record that names were dropped."""

    def note(self, names: object) -> None:
        super().note(names)  # type: ignore[arg-type]
        self._forgotten = 0


class Nameless(NewsMarks):
    """Negative control: marks that do not identify the coordinator's life."""

    def __init__(self, most_names: int) -> None:
        super().__init__(most_names)
        self._life = "0"


@pytest.mark.parametrize("make", [Forgetful, Nameless])
def test_marks_that_forget_or_name_no_member_miss_some(make: Callable[[int], NewsMarks]) -> None:
    note, ask = ("note", {"m0"}), ("ask", "m0")
    elsewhere = [("note", {name}) for name in NAMES[1:]]
    stories = [[ask, note, *elsewhere, ask], [note, ask, ("restart", None), note, ask]]
    assert any(run(story, lambda: make(2)) for story in stories)
    assert not any(run(story, lambda: NewsMarks(2)) for story in stories)


@pytest.mark.parametrize("state", LeaseState)
def test_borrowers_that_must_free_and_owed_lenders_are_concerned(state: LeaseState) -> None:
    lease = Lease(LeaseId("l"), 1, "lender", "borrower", 8, 1, state)
    must_free = state in (LeaseState.RECALLED, LeaseState.EXPIRED, LeaseState.LOST)
    expected = {name for name, is_so in (("borrower", must_free), ("lender", state in OWED)) if is_so}
    assert concerned([lease]) == expected
