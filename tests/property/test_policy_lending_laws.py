"""Laws of lending, under artificial loads: the floor, no flapping, recalls and offers in time."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from floodplain.policy.lending import LendingPolicy, LendingReason, LendingSettings, PoolLoad
from tests.support.examples import examples

FULL = 1000
LOADS = st.lists(
    st.tuples(
        st.floats(0.01, 4.0),  # seconds since the last look
        st.sampled_from([0, 0, 0, 0, 0, 0, 1, 30]),  # waiting
        st.one_of(st.integers(0, 300), st.integers(0, FULL)),  # used
        st.integers(0, 20),  # arrived since the last look
        st.sampled_from([True, True, True, False]),
    ),
    min_size=1,
    max_size=120,
)
FLOORS = st.integers(1, FULL)
SETTINGS = st.builds(
    lambda low, gap, calm_s, busy_s, rate, peak: LendingSettings(
        low=low,
        high=low + gap,
        calm_s=calm_s,
        busy_s=busy_s,
        profiled_rate=rate,
        profiled_peak_blocks=peak,
        window_s=8.0,
        rate_window_s=3.0,
    ),
    st.floats(0.1, 0.7),
    st.floats(0.05, 0.3),
    st.floats(2.0, 12.0),
    st.floats(0.0, 1.0),
    st.sampled_from([None, None, 0.5, 3.0]),
    st.none() | st.integers(0, FULL),
)
Looks = list[tuple[float, int, int, int, bool]]
PHASES = st.lists(
    st.tuples(
        st.integers(1, 40),  # equal looks
        st.tuples(
            st.sampled_from([0.25, 0.5, 1.0, 3.0]),
            st.sampled_from([0, 0, 0, 0, 1]),
            st.sampled_from([50, 100, 200, 500, 900]),
            st.sampled_from([0, 1, 2, 4]),
            st.just(True),
        ),
    ),
    min_size=2,
    max_size=10,
).map(lambda phases: [look for count, look in phases for _ in range(count)])
"""Loads that are constant for a while."""


def run(
    policy: LendingPolicy, looks: Looks, lag: float = 0.5, start_s: float = 50.0
) -> list[tuple[PoolLoad, int, LendingReason]]:
    """Return each look with its decision; the pool follows the target with a lag."""
    now, arrived, num_blocks, told = start_s, 0, FULL, []
    for gap_s, waiting, used, new, can_offer in looks:
        now, arrived = now + gap_s, arrived + new
        load = PoolLoad(now, waiting, min(used, num_blocks), num_blocks, FULL, arrived, can_offer)
        decision = policy.decide(load)
        num_blocks += round(lag * (FULL - decision.target_blocks - num_blocks))
        told.append((load, decision.target_blocks, decision.reason))
    return told


def kept_for_profile(how: LendingSettings) -> int:
    """Return the fewest blocks such that the profile's peak is below the high watermark."""
    return 0 if how.profiled_peak_blocks is None else int(how.profiled_peak_blocks / how.high) + 1


@settings(max_examples=examples(150))
@given(SETTINGS, FLOORS, st.none() | st.integers(0, FULL), LOADS)
def test_the_pool_keeps_its_floor_and_lends_at_most_the_limit(
    how: LendingSettings, floor: int, most: int | None, looks: Looks
) -> None:
    for load, target, reason in run(LendingPolicy(how, floor, most), looks):
        assert 0 <= target <= FULL - floor
        assert most is None or target <= most
        if reason is LendingReason.CALM:
            assert load.num_used_blocks <= how.low * (FULL - target) + 1, "hysteresis is judged by the load afterwards"
            assert not load.num_waiting and load.can_offer


@settings(max_examples=examples(150))
@given(SETTINGS, LOADS)
def test_nothing_flaps(how: LendingSettings, looks: Looks) -> None:
    """Offers are at least a calm time apart, and between two recalls there is an offer: this bounds both."""
    told = run(LendingPolicy(how, 1), looks)
    changes = [(b[0].now, b[1] > a[1]) for a, b in pairwise([(None, 0, None), *told]) if b[1] != a[1]]  # type: ignore[list-item]
    offers = [when_s for when_s, is_offer in changes if is_offer]
    assert all(b - a >= how.calm_s - 1e-9 for a, b in pairwise(offers))
    assert all(a[1] or b[1] for a, b in pairwise(changes))
    assert all(target == 0 for (_, target, reason) in told if reason not in (LendingReason.CALM, LendingReason.STEADY))
    if told:
        span_s = told[-1][0].now - told[0][0].now
        assert len(changes) <= 2 * (span_s / how.calm_s + 1)


@settings(max_examples=examples(100))
@given(SETTINGS, LOADS, st.lists(st.floats(0.01, 1.5), min_size=1, max_size=30), st.integers(0, FULL))
def test_waiting_for_longer_than_the_hold_time_recalls_everything(
    how: LendingSettings, before: Looks, gaps: list[float], used: int
) -> None:
    assume(sum(gaps[1:]) >= how.busy_s + 1e-6)
    waiting: Looks = [(gap_s, 1, used, 0, True) for gap_s in gaps]
    assert run(LendingPolicy(how, 1), before + waiting)[-1][1] == 0


@settings(max_examples=examples(60))
@given(SETTINGS, LOADS, st.floats(0.02, 1.0), st.floats(0.0, 0.9), st.integers(0, 4))
def test_a_constant_calm_load_ends_up_lending(
    how: LendingSettings, before: Looks, look_s: float, part: float, new: int
) -> None:
    """For any history. In the end it lends a constant number of blocks: those that the load does not need."""
    used = int(part * how.low * FULL)
    spare = FULL - max(1, -(-used // how.low), kept_for_profile(how))
    assume(spare >= 1.1 * how.least_part * FULL)
    assume(how.profiled_rate is None or new / look_s <= how.profiled_rate)
    assume(new / look_s < 50 or how.profiled_rate is None)
    num_looks = round((how.window_s + 3 * how.calm_s + 2) / look_s)
    told = run(LendingPolicy(how, 1), before + [(look_s, 0, used, new, True)] * num_looks)
    target = told[-1][1]
    assert target > 0
    assert spare - target <= how.least_part * FULL + 2
    assert {t for _, t, _ in told[-3:]} == {target}


@given(LOADS)
def test_equal_loads_give_equal_decisions(looks: Looks) -> None:
    one, other = (LendingPolicy(LendingSettings(), 100) for _ in range(2))
    assert run(one, looks) == run(other, looks)


@settings(max_examples=examples(150))
@given(PHASES, st.sampled_from([0.125, 0.5, 2.0, 8.0]))
def test_with_another_calm_everything_happens_alike_in_another_time(phases: Looks, factor: float) -> None:
    """Scaling by powers of two is exact, so the decisions must be identical."""
    how = LendingSettings(busy_s=1.0, rise=1.2, rise_sigmas=0.5)
    slow = run(LendingPolicy(how, 100), phases)
    stretched: Looks = [(factor * gap_s, *rest) for gap_s, *rest in phases]  # type: ignore[misc]
    other = run(LendingPolicy(how.at_calm(factor * how.calm_s), 100), stretched, start_s=factor * 50.0)
    assert [told[1:] for told in slow] == [told[1:] for told in other]


INSIDE = st.lists(
    st.tuples(
        st.floats(0.01, 4.0),  # seconds since the last look
        st.floats(0.0, 1.0),  # of the profile's peak
        st.floats(0.0, 1.0),  # of its rate
        st.sampled_from([True, True, False]),
    ),
    min_size=1,
    max_size=80,
)
PROFILED = SETTINGS.filter(lambda how: None not in (how.profiled_rate, how.profiled_peak_blocks))


def load_inside(how: LendingSettings, parts: list[tuple[float, float, float, bool]], excess: float = 1.0) -> Looks:
    """Return looks at a load within its profile, or above it by the factor ``excess``."""
    peak, rate = excess * (how.profiled_peak_blocks or 0), excess * (how.profiled_rate or 0.0)
    return [(gap_s, 0, int(used * peak), int(new * rate * gap_s), can_offer) for gap_s, used, new, can_offer in parts]


@settings(max_examples=examples(150))
@given(PROFILED, FLOORS, INSIDE)
def test_a_load_within_its_profile_is_never_recalled_for(
    how: LendingSettings, floor: int, parts: list[tuple[float, float, float, bool]]
) -> None:
    told = run(LendingPolicy(how, floor), load_inside(how, parts))
    targets = [target for _, target, _ in told]
    assert targets == sorted(targets)
    assert all(how.high * (FULL - target) >= (how.profiled_peak_blocks or 0) for target in targets if target)


@settings(max_examples=examples(100))
@given(PROFILED, FLOORS, INSIDE)
def test_the_first_offer_of_a_profile_waits_for_no_calm(
    how: LendingSettings, floor: int, parts: list[tuple[float, float, float, bool]]
) -> None:
    """While use is low, the offer is made once offers can be sent, of all that the profile and the floor leave."""
    low_parts = [(gap_s, used * how.low, new, can_offer) for gap_s, used, new, can_offer in parts]
    looks = load_inside(how, low_parts)
    assume(any(can_offer for *_, can_offer in looks))
    spare = FULL - max(floor, kept_for_profile(how))
    assume(spare >= max(1, how.least_part * FULL) and (how.profiled_peak_blocks or 0) <= FULL)
    told = run(LendingPolicy(how, floor), looks)
    first = next(i for i, (load, _, _) in enumerate(told) if load.can_offer)
    assert told[first][1:] == (spare, LendingReason.CALM)
    assert not any(target for _, target, _ in told[:first])
