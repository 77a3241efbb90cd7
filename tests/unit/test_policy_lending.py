"""Lending by example: AQUA's Figure 12, each reason for a recall, and what is no reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from floodplain.core.errors import InvariantError
from floodplain.policy.lending import LendingPolicy, LendingReason, LendingSettings, PoolLoad

FULL = 1000
LOOK_S = 0.05
HOW = LendingSettings()


class Engine:
    """Reports its load to a policy at each look, and applies the target at once."""

    def __init__(self, policy: LendingPolicy) -> None:
        self._policy = policy
        self._now = self._arrived = 0.0
        self.target = 0
        self.changes: list[tuple[float, int, LendingReason]] = []

    def run(self, seconds: float, *, used: int = 0, waiting: int = 0, rate: float = 0.0, can_offer: bool = True) -> int:
        """Report a constant load; return the last target."""
        for _ in range(round(seconds / LOOK_S)):
            self._now += LOOK_S
            self._arrived += rate * LOOK_S
            blocks = FULL - self.target
            load = PoolLoad(self._now, waiting, used, blocks, FULL, int(self._arrived + 1e-9), can_offer)
            decision = self._policy.decide(load)
            if decision.target_blocks != self.target:
                self.changes.append((self._now, decision.target_blocks, decision.reason))
            self.target = decision.target_blocks
        return self.target


@pytest.fixture
def engine() -> Iterator[Engine]:
    yield Engine(LendingPolicy(HOW, least_blocks=100))


def test_the_story_of_figure_12(engine: Engine) -> None:
    """Steady traffic, twice as much from 120 s to 180 s so that requests queue, and steady again."""
    steady = engine.run(120, used=300, rate=2)
    assert steady == 500  # the peak of 300 takes 60 % of what is kept
    assert engine.run(60, used=480, rate=4, waiting=8) == 0
    assert engine.run(60, used=300, rate=2) > 0
    offered_s, recalled_s, again_s = (when_s for when_s, _, _ in engine.changes[:3])
    assert offered_s == pytest.approx(HOW.calm_s, abs=0.2)
    assert recalled_s == pytest.approx(120 + HOW.busy_s, abs=0.2)
    assert again_s == pytest.approx(180 + HOW.calm_s, abs=0.2)
    assert [reason for _, _, reason in engine.changes[:2]] == [LendingReason.CALM, LendingReason.WAITING]
    assert engine.target == steady  # once the peak of the busy time is out of the window


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ({"used": 300, "waiting": 1, "rate": 2}, LendingReason.WAITING),
        ({"used": 401, "rate": 2}, LendingReason.POOL_FULL),
        ({"used": 300, "rate": 4}, LendingReason.RATE_RISEN),
    ],
)
def test_each_trouble_recalls_everything(engine: Engine, trouble: dict[str, float], reason: LendingReason) -> None:
    assert engine.run(60, used=300, rate=2) == 500
    begin_s = engine._now
    engine.run(9.5, **trouble)  # type: ignore[arg-type]
    when_s, target, why = engine.changes[-1]
    assert (target, why) == (0, reason)
    assert when_s - begin_s < (HOW.rate_window_s if reason is LendingReason.RATE_RISEN else 2 * HOW.busy_s)


def test_what_is_no_trouble(engine: Engine) -> None:
    assert engine.run(60, used=300, rate=2) == 500
    assert engine.run(HOW.busy_s / 2, used=300, rate=2, waiting=3) == 500  # a short wait
    assert engine.run(60, used=390, rate=2) == 500  # between the watermarks
    assert engine.run(60, used=300, rate=2.6) == 500  # a third more
    assert len(engine.changes) == 1


def test_a_wait_that_comes_and_goes_is_one_wait(engine: Engine) -> None:
    engine.run(60, used=300)
    for _ in range(8):
        engine.run(LOOK_S, used=300, waiting=1)
        engine.run(LOOK_S, used=300)
    assert engine.changes[-1][1:] == (0, LendingReason.WAITING)


def test_a_falling_load_offers_more_and_a_higher_rate_is_a_new_profile(engine: Engine) -> None:
    assert engine.run(60, used=300, rate=2) == 500
    assert engine.run(60, used=120, rate=1) == 800
    assert engine.run(11, used=120, rate=2) == 0, "twice the rate of the last offer"
    assert engine.run(60, used=120, rate=2) == 800


def test_a_profiled_rate_decides_instead_of_that_of_the_offer() -> None:
    engine = Engine(LendingPolicy(LendingSettings(profiled_rate=5.0), least_blocks=100))
    assert engine.run(60, used=300, rate=1) == 500
    assert engine.run(30, used=300, rate=5) == 500, "the profile has it"
    assert engine.run(30, used=300, rate=10) == 0
    assert engine.run(30, used=300, rate=10) == 0, "nor does it offer above it"
    assert engine.run(60, used=300, rate=5) == 500


PROFILE = LendingSettings(profiled_rate=5.0, profiled_peak_blocks=400)


def test_a_profile_is_offered_beside_from_the_start() -> None:
    engine = Engine(LendingPolicy(PROFILE, least_blocks=100))
    assert engine.run(LOOK_S) == 499, "the peak of 400 takes 80 % of what is kept"
    assert engine.run(60, used=400, rate=5) == 499, "the load that was profiled"
    assert engine.run(60, rate=1) == 499, "nor more while it is idle"
    assert engine.run(60, used=480, rate=10, waiting=8) == 0
    assert engine.run(20, used=300, rate=5) == 200, "the peak of 480 is not forgotten"
    assert engine.run(60, used=300, rate=5) == 499
    assert [reason for *_, reason in engine.changes[:2]] == [LendingReason.CALM, LendingReason.WAITING]


def test_without_a_profile_or_above_it_there_is_no_offer_at_the_start(engine: Engine) -> None:
    assert engine.run(9) == 0
    for trouble in ({"used": 900}, {"waiting": 1}, {"used": 650}):
        profiled = Engine(LendingPolicy(PROFILE, least_blocks=100))
        assert profiled.run(5, **trouble) == 0  # type: ignore[arg-type]
        assert profiled.run(9) == 0, "it waits for calm as any other"


def test_use_above_the_profile_is_recalled_for() -> None:
    engine = Engine(LendingPolicy(PROFILE, least_blocks=100))
    assert engine.run(20, rate=5) == engine.run(20, used=400, rate=5) == 499
    assert engine.run(1, used=402, rate=5) == 0
    assert engine.changes[-1][-1] is LendingReason.POOL_FULL


def test_no_bytes_are_offered_without_a_receiver_or_a_gain(engine: Engine) -> None:
    assert engine.run(60, used=300, can_offer=False) == 0
    assert engine.run(60, used=590) == 0, "a sixtieth of the pool"
    assert engine.run(60, used=300) == 500
    assert engine.run(1, used=300, waiting=1, can_offer=False) == 0, "a recall does not ask"


@pytest.mark.parametrize("wrong", [{"low": 0.9}, {"low": 0.0}, {"high": 1.1}, {"busy_s": 10.0}])
def test_settings_that_would_flap_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvariantError):
        LendingSettings(**wrong)
