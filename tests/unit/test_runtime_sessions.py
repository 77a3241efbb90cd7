"""The book of sessions: who continues whom, what gaps teach, and which pins end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.backups import BackupTable
from floodplain.core.hashing import BlockKey
from floodplain.core.idle_backups import Pin
from floodplain.core.tiers import SlotLedger, Tier
from floodplain.policy.returns import NUM_BINS, bin_of
from floodplain.runtime import sessions
from floodplain.runtime.sessions import SessionBook

SLOTS = 8


def keys(name: str, num_blocks: int = 2) -> list[BlockKey]:
    return [BlockKey(f"{name}{place}".encode()) for place in range(num_blocks)]


def make_book(num_slots: int = SLOTS) -> tuple[SessionBook, BackupTable]:
    backups = BackupTable([SlotLedger(Tier.HOST, num_slots)])
    return SessionBook(backups), backups


def live(book: SessionBook, name: str, begin_s: float, end_s: float, tenant: str = "") -> Pin | None:
    """One request of a session, from its arrival to its end."""
    one = book.arrive(name, tenant, keys(name), begin_s)
    book.start(one, begin_s)
    return book.end(one, keys(name), end_s)


def save(backups: BackupTable, pin: Pin | None) -> None:
    """Back the contents of a pin up, as the loop does."""
    assert pin is not None
    written = backups.begin_write(Tier.HOST, [key for key in pin.keys if backups.find(key) is None], pin.worth)
    backups.commit_write(written or [])


def need(backups: BackupTable, num_slots: int) -> None:
    """Live requests take slots for a while."""
    taken = backups.begin_write(Tier.HOST, keys("live", num_slots))
    assert taken is not None
    backups.abort_write(taken)


# -- which requests follow each other ----------------------------------------------------------------------------------


def test_a_name_of_the_same_tenant_is_the_same_session() -> None:
    book, _ = make_book()
    first = book.arrive("chat", "alice", keys("a", 8), 0.0)
    book.end(first, keys("a"), 0.5)
    assert book.arrive("chat", "bob", keys("a", 8), 1.0) != first
    assert book.arrive("chat", "alice", [*keys("a", 4), *keys("edited", 9)], 1.0) == first


def test_a_name_for_many_conversations_is_a_session_for_each() -> None:
    """They are told apart by their prompts, and beside a live request by nothing less than the whole prompt."""
    book, _ = make_book()
    one = book.arrive("app", "", keys("a", 8), 0.0)
    assert book.arrive("app", "", [*keys("a", 4), *keys("b")], 0.0) != one
    assert book.arrive("app", "", keys("a", 8), 0.0) == one
    book.give_up(one)
    book.end(one, keys("a", 8), 1.0)
    assert book.arrive("app", "", [*keys("a", 3), *keys("c", 9)], 1.0) != one
    assert book.arrive("app", "", keys("a", 9), 1.0) == one


def test_sessions_of_one_name_learn_from_each_other() -> None:
    book, _ = make_book(num_slots=1000)
    for number in range(12):
        one = book.arrive("app", "", keys(f"chat{number}"), number)
        book.start(one, number)
        book.end(one, keys("a"), number)
        assert book.arrive("app", "", keys(f"chat{number}", 3), number + 0.1) == one
        book.start(one, number + 0.1)
        book.give_up(one)
    named = book.end(book.arrive("app", "", keys("new"), 50.0), keys("b"), 50.0)
    other = book.end(book.arrive("other", "", keys("other"), 50.0), keys("c"), 50.0)
    assert named is not None and other is not None and named.worth > other.worth


def test_without_a_name_a_prompt_continues_the_longest_prompt_that_it_begins_with() -> None:
    book, _ = make_book()
    short = book.arrive("", "", keys("a", 2), 0.0)
    long = book.arrive("", "", keys("b", 3), 0.0)
    assert book.arrive("", "", keys("a", 5), 1.0) == short
    assert book.arrive("", "", [*keys("b", 3), *keys("c")], 1.0) == long
    assert book.arrive("", "", keys("b", 2), 1.0) not in (short, long)
    assert book.arrive("", "", keys("a", 3), 1.0) not in (short, long), "the session's newest prompt is longer"


def test_a_prompt_does_not_continue_that_of_another_tenant() -> None:
    book, _ = make_book()
    first = book.arrive("", "alice", keys("a"), 0.0)
    assert book.arrive("", "bob", keys("a", 3), 0.0) != first


def test_a_session_is_pinned_when_its_last_live_request_ends() -> None:
    book, backups = make_book()
    one = book.arrive("chat", "", keys("a"), 0.0)
    assert book.arrive("chat", "", keys("a"), 0.0) == one
    assert book.end(one, keys("a"), 1.0) is None
    pin = book.end(one, keys("b"), 2.0)
    assert list(backups.idle.pins) == [pin] and pin is not None and pin.keys == keys("b")


def test_an_aborted_request_unpins_its_session() -> None:
    book, backups = make_book()
    live(book, "chat", 0.0, 1.0)
    one = book.arrive("chat", "", keys("chat"), 2.0)
    assert len(backups.idle.pins) == 1
    book.give_up(one)
    assert not backups.idle.pins


def test_a_pin_whose_next_request_has_arrived_is_worth_what_waits_teach() -> None:
    """More than before it arrived if requests start at once, and less with each second if those that wait wait long."""
    book, _ = make_book(num_slots=1000)
    for number in range(40):
        live(book, "quick", number, number + 0.5)
    pin = live(book, "reader", 0.0, 50.0)
    assert pin is not None
    before = pin.worth
    one = book.arrive("reader", "", keys("reader"), 51.0)
    assert pin.worth > 10 * before
    arrived = pin.worth
    book.advance(60.0)
    assert pin.worth < arrived / 10
    book.start(one, 61.0)
    assert pin not in book._backups.idle.pins, "its KV is on the device, or kept for the request"


# -- what gaps teach ---------------------------------------------------------------------------------------------------


EIGHTHS = st.integers(1, 32_000)  # sums are exact


def expected_hazards(times_s: list[float]) -> list[float]:
    """Of these gaps or waits, over a prior of 0 that weighs two of them."""
    bins = [bin_of(time_s) for time_s in times_s]
    return [bins.count(index) / (sum(one >= index for one in bins) + 2.0) for index in range(NUM_BINS)]


@given(st.lists(st.tuples(EIGHTHS, EIGHTHS), min_size=1, max_size=12), st.lists(st.integers(0, 16), max_size=30))
def test_gaps_and_waits_are_learned_the_same_however_often_time_advances(
    times: list[tuple[int, int]], looks: list[int]
) -> None:
    """A bin is outlasted when time passes its end, or when the next request shows that it was."""
    book, _ = make_book()
    now, waits_s, gaps_s = 0.0, [], []
    one = book.arrive("chat", "", keys("a"), now)
    for silent, waiting in times:
        book.end(one, keys("a"), now)
        arrived_s, started_s = now + silent / 8, now + silent / 8 + waiting / 8
        for look in sorted(looks):
            book.advance(now + look / 16 * silent / 8)
        assert book.arrive("chat", "", keys("a"), arrived_s) == one
        for look in sorted(looks):
            book.advance(arrived_s + look / 16 * waiting / 8)
        book.start(one, started_s)
        gaps_s.append(started_s - now)
        waits_s.append(started_s - arrived_s)
        now = started_s + 1.0
    nothing = [0.0] * NUM_BINS
    assert book._sessions[one].gaps.hazards(nothing) == pytest.approx(expected_hazards(gaps_s))
    assert book._waits.hazards(nothing) == pytest.approx(expected_hazards(waits_s))


def book_of(gap_s: float, num_slots: int = SLOTS) -> tuple[SessionBook, BackupTable, Pin]:
    """A book of one session with always the same gap, its table, and its pin at 1000 s."""
    book, backups = make_book(num_slots)
    for turn in range(12):
        end_s = 1000.0 - (12 - turn) * (gap_s + 1.0)
        live(book, "chat", end_s - 1.0, end_s)
    pin = live(book, "chat", 999.0, 1000.0)
    assert pin is not None
    return book, backups, pin


@pytest.mark.parametrize(("gap_s", "kept_s", "gone_s"), [(0.4, 0.4, 30.0), (40.0, 60.0, 300.0)])
def test_a_pin_ends_some_time_after_the_usual_gap(gap_s: float, kept_s: float, gone_s: float) -> None:
    """If a slot costs a hundredth of a return per second."""
    book, backups, pin = book_of(gap_s)
    for after_s, is_pinned in ((0.0, True), (kept_s, True), (gone_s, False)):
        backups.idle.price = 0.01
        book.advance(1000.0 + after_s)
        assert (pin in backups.idle.pins) is is_pinned
    assert book.counts.num_expired_blocks == 2


def test_a_session_that_returns_soon_is_worth_more() -> None:
    assert book_of(0.4)[2].worth > 10 * book_of(40.0)[2].worth


def test_a_new_session_is_taken_for_one_like_all_others() -> None:
    book, _ = make_book()
    for number in range(40):
        live(book, f"quick{number}", number, number + 0.5)
        live(book, f"quick{number}", number + 0.6, number + 0.7)
    quick = live(book, "new", 50.0, 51.0)
    other, _ = make_book()
    unknown = live(other, "new", 50.0, 51.0)
    assert quick is not None and unknown is not None and quick.worth > 2 * unknown.worth


def test_requests_that_no_other_follows_are_not_worth_a_copy_in_the_end() -> None:
    book, _ = make_book()
    pins = []
    for number in range(300):
        book.advance(number * 30.0)
        one = book.arrive("", "", keys(f"single{number}"), number * 30.0)
        pins.append(book.end(one, keys("a"), number * 30.0, least_chance=0.2))
    assert pins[0] is not None and pins[-1] is None


# -- the price of a slot -----------------------------------------------------------------------------------------------


def test_slots_that_are_needed_are_those_of_the_cheapest_pins_from_the_end() -> None:
    book, backups = make_book(num_slots=4)
    for turn in range(12):
        live(book, "agent", turn * 100.0, turn * 100.0 + 99.6)
        live(book, "reader", turn * 100.0, turn * 100.0 + 40.0)
    for name in ("agent", "reader"):
        save(backups, live(book, name, 1200.0, 1300.0))
    need(backups, 1)
    left = {key for name in ("agent", "reader") for key in keys(name) if backups.find(key) is not None}
    assert left == {*keys("agent"), keys("reader")[0]}
    book.advance(1300.0)
    assert book.price > 0


def test_the_price_falls_while_no_slot_is_needed() -> None:
    book, backups = make_book(num_slots=2)
    save(backups, live(book, "chat", 0.0, 1.0))
    need(backups, 1)
    book.advance(1.0)
    before = book.price
    book.advance(11.0)
    assert 0 < book.price == pytest.approx(before / 2)


# -- tenants -----------------------------------------------------------------------------------------------------------


def flood(book: SessionBook, tenant: str, number: int) -> None:
    for index in range(number):
        live(book, f"{tenant}{index}", 0.0, 1.0, tenant)


def count_pinned(backups: BackupTable) -> Counter[str]:
    return Counter(pin.tenant for pin in backups.idle.pins for _ in pin.keys)


def test_a_tenant_with_many_sessions_forgets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 8)
    book, _ = make_book(num_slots=1000)
    first = book.arrive("chat", "alice", keys("chat"), 0.0)
    pin = book.end(first, keys("chat"), 1.0)
    flood(book, "bob", 50)
    assert len(book._sessions) == 8
    assert book.arrive("chat", "alice", keys("chat"), 2.0) == first and book.counts.hits == 1
    assert pin in book._backups.idle.pins
    book.check_integrity()


def test_the_session_that_was_unused_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 3)
    book, _ = make_book(num_slots=1000)
    flood(book, "bob", 3)
    used = book.arrive("bob0", "bob", keys("bob0"), 2.0)
    live(book, "new", 3.0, 4.0, "bob")
    assert book.arrive("bob0", "bob", keys("bob0"), 5.0) == used
    book.arrive("", "bob", keys("bob1", 3), 6.0)  # continues no session that was forgotten
    book.check_integrity()


def test_a_tenant_pins_at_most_its_part_of_the_slots() -> None:
    book, backups = make_book(num_slots=8)
    flood(book, "bob", 4)
    assert count_pinned(backups) == {"bob": 8}
    live(book, "chat", 0.0, 1.0, "alice")
    assert count_pinned(backups) == {"alice": 2, "bob": 4}


# -- mutants -----------------------------------------------------------------------------------------------------------


def forgets_the_oldest_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "max", lambda items, key: ("alice", 0), raising=False)


def never_outlasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SessionBook, "advance", lambda book, now: book._update_price(now))


def keeps_pins_of_aborted_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SessionBook, "give_up", lambda book, name: None)


def never_lets_the_price_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_PRICE_HALVES_S", inf)


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[..., None]]] = [
    (forgets_the_oldest_of_all, test_a_tenant_with_many_sessions_forgets_its_own),
    (never_outlasts, test_requests_that_no_other_follows_are_not_worth_a_copy_in_the_end),
    (keeps_pins_of_aborted_requests, test_an_aborted_request_unpins_its_session),
    (never_lets_the_price_fall, test_the_price_falls_while_no_slot_is_needed),
]


@pytest.mark.parametrize(("mutate", "law"), MUTANTS, ids=lambda one: one.__name__)
def test_the_laws_notice_a_book_that(
    mutate: Callable[[pytest.MonkeyPatch], None], law: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    arguments: tuple[Hashable, ...] = (monkeypatch,) if law.__code__.co_argcount else ()
    with pytest.raises((AssertionError, StopIteration)):
        law(*arguments)
