"""Pins against plain lists: eviction takes unpinned backups first, then the last contents of the cheapest pins."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from floodplain.core.backups import Backup, BackupTable
from floodplain.core.errors import InvariantError
from floodplain.core.hashing import BlockKey
from floodplain.core.idle_backups import IdleBackups, Pin
from floodplain.core.tiers import SlotLedger, Tier
from tests.support.controls import Controls, Fault
from tests.support.examples import examples

KEYS = [BlockKey(bytes([n])) for n in range(8)]


class PinMachine(RuleBasedStateMachine):
    """Backups come to rest, are pinned, unpinned, and evicted for writes that need or only want their slots."""

    @initialize(num_slots=st.integers(1, 6))
    def begin(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.table = BackupTable([SlotLedger(Tier.HOST, num_slots)])
        self.pins: list[Pin] = []
        self.kept: list[Backup] = []

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True, max_size=4), is_kept=st.booleans())
    def write(self, keys: list[BlockKey], is_kept: bool) -> None:
        """A pin is never the reason that there is no slot: only backups that are in use are."""
        keys = [key for key in keys if self.table.find(key) is None]
        backups = self.table.begin_write(Tier.HOST, keys)
        assert (backups is not None) == (len(keys) <= self.num_slots - len(self.kept))
        self.settle(backups or [], is_kept)

    @rule(key=st.sampled_from(KEYS), below=st.sampled_from([0.0, 1.0, 2.0]))
    def write_if_cheap(self, key: BlockKey, below: float) -> None:
        if self.table.find(key) is None:
            safe = {key for pin in self.pins if pin.worth >= below for key in pin.keys if self.table.find(key)}
            self.settle(self.table.begin_write(Tier.HOST, [key], below) or [], False)
            assert all(self.table.find(key) for key in safe)

    def settle(self, backups: list[Backup], is_kept: bool) -> None:
        for backup in backups:
            if is_kept:
                self.table.keep(backup)
                self.kept.append(backup)
        self.table.commit_write(backups)

    @precondition(lambda self: self.kept)
    @rule(index=st.integers(0, 9))
    def release(self, index: int) -> None:
        self.table.release(self.kept.pop(index % len(self.kept)))

    @rule(
        keys=st.lists(st.sampled_from(KEYS), unique=True, min_size=1, max_size=5),
        worth=st.sampled_from([0.5, 1.0, 2.0]),
        tenant=st.sampled_from("ab"),
    )
    def pin(self, keys: list[BlockKey], worth: float, tenant: str) -> None:
        pin = Pin(keys, tenant, worth)
        self.table.pin(pin)
        self.pins.append(pin)
        tenants = {pin.tenant for pin in self.table.idle.pins}
        for tenant in tenants if len(tenants) > 1 else ():
            held = sum(len(pin.keys) for pin in self.table.idle.pins if pin.tenant == tenant)
            assert held <= self.num_slots // 2

    @precondition(lambda self: self.pins)
    @rule(index=st.integers(0, 9))
    def unpin(self, index: int) -> None:
        self.table.unpin(self.pins.pop(index % len(self.pins)))

    @invariant()
    def accounts_balance(self) -> None:
        self.table.check_integrity()
        assert self.table.num_available(Tier.HOST) == self.num_slots - len(self.kept)
        pinned = Counter(key for pin in self.pins for key in pin.keys)
        idle = {key for key in pinned if (backup := self.table.find(key)) is not None and backup not in self.kept}
        assert self.table.idle.count_pinned(Tier.HOST) == len(idle)


PinMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPinMachine = PinMachine.TestCase


def tour(machine: PinMachine) -> None:
    """One pin of each tenant, pressure, and an end of each."""
    machine.begin(4)
    steps: list[tuple[Any, ...]] = [
        ("write", KEYS[:4], False),
        ("pin", KEYS[:2], 1.0, "a"),
        ("pin", KEYS[2:4], 2.0, "b"),
        ("write_if_cheap", KEYS[4], 1.0),
        ("write", KEYS[4:6], True),
        ("release", 0),
        ("unpin", 1),
        ("write", KEYS[5:8], True),
    ]
    for name, *args in steps:
        getattr(machine, name)(*args)
        machine.accounts_balance()


def test_a_tour_of_pins() -> None:
    machine = PinMachine()
    tour(machine)


CONTROLS = Controls()
CONTROLS.add("refuses_what_is_pinned", IdleBackups, "find_victim", lambda find, *about: find(*about[:3], 0.0))
CONTROLS.add("evicts_for_what_is_only_wanted", IdleBackups, "find_victim", lambda find, *about: find(*about[:3]))
CONTROLS.add("has_no_shares", IdleBackups, "pin", lambda pin, idle, one, num_slots: pin(idle, one, 10**9))
CONTROLS.add("forgets_to_move", IdleBackups, "_move", lambda _, idle, key: None)


@pytest.mark.parametrize("fault", CONTROLS)
def test_the_laws_notice_a_table_that(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, InvariantError, StopIteration)):
        tour(PinMachine())
        machine = PinMachine()
        machine.begin(4)
        machine.write(KEYS[:4], False)
        machine.pin(KEYS[:4], 1.0, "a")
        machine.pin(KEYS[4:8], 1.0, "b")
