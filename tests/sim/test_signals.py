"""Leases of many members whose loads are signals: conservation, faults, and beats that may be left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from examples.simulate.planning.quiet import QuietCoordinator
from examples.simulate.planning.signals import PoolSignal, SignalMembers, SignalSettings
from floodplain.sim.coordinator import VirtualCoordinator
from floodplain.sim.environment import Environment

MIB, GIB = 2**20, 2**30
SETTINGS = SignalSettings(
    lender_block_bytes=2 * MIB,
    full_blocks=10_000,
    least_blocks=500,
    borrower_block_bytes=4 * MIB,
    lease_bytes=GIB,
    most_bytes=8 * GIB,
    idle_s=60.0,
    bandwidth=10e9,
    look_s=5.0,
)
NUM_PAIRS = 3
END_S = 1200.0
HELD = 6 * GIB
"""What a borrower that needs 5 GiB keeps: one lease to spare."""
PAIRS = {f"b{place}": (f"l{place}",) for place in range(NUM_PAIRS)}
Fault = tuple[float, Callable[[SignalMembers], None]]


def pool_at(now: float) -> PoolSignal:
    """A burst from 300 to 400 s fills the pool and makes requests wait."""
    is_busy = 300 <= now < 400
    return PoolSignal(9_000 if is_busy else 1_000, 5 if is_busy else 0, int(now))


def need_at(now: float) -> int:
    """Little, much between 100 and 800 s, then nothing."""
    return 5 * GIB if 100 <= now < 800 else 0


def run(*faults: Fault, beats: bool = False, settings: SignalSettings = SETTINGS) -> SignalMembers:
    environment = Environment()
    coordinator = (VirtualCoordinator if beats else QuietCoordinator)(environment, 10.0, PAIRS)
    members = SignalMembers(coordinator, settings)
    for place in range(NUM_PAIRS):
        members.lend(f"l{place}", pool_at)
        members.borrow(f"b{place}", need_at)
    for when_s, fault in faults:
        environment.schedule(when_s, lambda fault=fault: fault(members))  # type: ignore[misc]
    environment.run(END_S)
    totals = coordinator.totals
    ended = sum(totals.num_bytes[name] for name in ("recalled", "returned", "lost"))
    assert totals.num_bytes["granted"] == ended + sum(totals.live.values())
    coordinator.book.rows.check_integrity()
    leased = sum(coordinator.book.rows.leased_bytes(f"l{place}") for place in range(NUM_PAIRS))
    assert leased == sum(totals.live.values()) >= sum(members.devices.held.values())
    assert min(members.devices.held.values()) >= 0
    return members


def counts(members: SignalMembers) -> Mapping[str, int]:
    return dict(members.coordinator.totals.num_leases)


def lent_at(members: SignalMembers, when_s: float) -> int:
    return [num_bytes for t, num_bytes in members.coordinator.totals.samples if t <= when_s][-1]


def lose_device(members: SignalMembers) -> None:
    members.kill("l0", is_device_lost=True)
    assert members.devices.held["l0"] == 0, "the next device is not empty"


def restart_borrower(members: SignalMembers) -> None:
    members.borrow("b0", need_at)


def test_bursts_of_lenders_recall_and_borrowers_return_what_is_idle() -> None:
    members = run()
    assert lent_at(members, 299) == NUM_PAIRS * HELD
    assert lent_at(members, 380) == 0 and members.counts["moved"] == NUM_PAIRS * 5 * GIB
    assert lent_at(members, 700) > 0 and members.counts["lost"] == 0
    assert counts(members)["recalled"] and counts(members)["returned"] and "lost" not in counts(members)


def test_a_borrower_that_needs_nothing_keeps_nothing() -> None:
    """The control: what it leased before it knew that goes back."""
    environment = Environment()
    members = SignalMembers(QuietCoordinator(environment, 10.0, PAIRS), SETTINGS)
    members.lend("l0", lambda now: PoolSignal(1_000, 0, int(now)))
    members.borrow("b0", lambda _: 0)
    environment.run(END_S)
    assert not members.coordinator.totals.live and members.needed_byte_s == 0.0
    assert counts(members)["granted"] == counts(members)["returned"]


def test_equal_runs_have_equal_leases_and_messages() -> None:
    first, again = run(), run()
    assert first.coordinator.totals.samples == again.coordinator.totals.samples
    assert first.coordinator.num_messages == again.coordinator.num_messages


DEATH: Fault = (200.0, lambda members: members.kill("b0", is_device_lost=False))
LENDER_DEATH: Fault = (200.0, lose_device)
DOWN: Fault = (195.0, lambda members: members.coordinator.stop())
UP: Fault = (260.0, lambda members: members.coordinator.start())


@pytest.mark.parametrize(
    "faults",
    [
        (),
        (DEATH, (230.0, restart_borrower)),
        (LENDER_DEATH, (230.0, lambda members: members.lend("l0", pool_at))),
        (DOWN, UP),
        (DOWN, DEATH, UP),
        (DOWN, LENDER_DEATH, UP),
    ],
    ids=["none", "borrower", "lender", "coordinator", "coordinator and borrower", "coordinator and lender"],
)
@pytest.mark.slow
def test_heartbeats_that_say_nothing_can_be_left_out(faults: tuple[Fault, ...]) -> None:
    lazy, real = run(*faults), run(*faults, beats=True)
    assert counts(lazy) == counts(real)
    assert lazy.coordinator.totals.num_bytes == real.coordinator.totals.num_bytes
    assert lazy.counts == real.counts
    sent = real.coordinator.num_messages["heartbeat"]
    assert sent > 5 * lazy.coordinator.num_messages["heartbeat"]


def test_leases_of_a_dead_borrower_are_lost_once_the_coordinator_has_noticed() -> None:
    members = run(DEATH)
    assert members.coordinator.totals.num_bytes["lost"] == HELD
    assert lent_at(members, 205) == lent_at(members, 199) == lent_at(members, 230) + HELD


def test_leases_on_a_lost_device_are_lost_at_once_and_computed_again() -> None:
    members = run(LENDER_DEATH)
    assert members.coordinator.totals.num_bytes["lost"] == HELD
    assert members.counts["lost"] == 5 * GIB
    assert lent_at(members, 201) == lent_at(members, 199) - HELD


def test_a_lost_device_is_reported_once_a_coordinator_answers() -> None:
    members = run(DOWN, LENDER_DEATH, UP)
    assert lent_at(members, 259) == lent_at(members, 194) == lent_at(members, 262) + HELD


def test_while_no_coordinator_answers_leases_stay_and_recalls_wait() -> None:
    members = run((120.0, lambda members: members.coordinator.stop()), (340.0, UP[1]))
    assert lent_at(members, 339) == lent_at(members, 119) > 0
    assert lent_at(members, 360) == 0


def test_what_a_slow_link_cannot_move_before_the_deadline_is_lost() -> None:
    members = run(settings=replace(SETTINGS, bandwidth=0.2e9))
    assert members.counts["lost"] > members.counts["moved"] > 0
    assert members.counts["lost"] + members.counts["moved"] == NUM_PAIRS * 5 * GIB
