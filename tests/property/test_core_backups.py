"""Backups and slots against plain sets: a slot has one tenant, and only completely written backups are found.

A whole backup that no request keeps and no copy uses is idle: it is found until its slot is needed. The least recently
used is evicted first. Any other slot is free when no request keeps its backup (or it is lost) and no copy uses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from floodplain.core.backups import Backup, BackupTable
from floodplain.core.errors import InvariantError
from floodplain.core.hashing import BlockKey
from floodplain.core.idle_backups import IdleBackups, Pin
from floodplain.core.tiers import Location, SlotLedger, Tier
from tests.support.backup_faults import commits_what_failed, frees_slots_that_a_copy_reads, moves_what_is_read
from tests.support.controls import Controls, Fault
from tests.support.examples import examples

INDEX = st.integers(0, 63)
KEYS = [BlockKey(bytes([n])) for n in range(6)]


class BackupMachine(RuleBasedStateMachine):
    """Sequences keep backups, copies write and read them, some are lost."""

    @initialize(num_host=st.integers(0, 6), num_peer=st.integers(0, 3), retains=st.booleans())
    def begin(self, num_host: int, num_peer: int, retains: bool) -> None:
        self.sizes = {Tier.HOST: num_host, Tier.PEER: num_peer}
        self.retains = retains
        self.table = BackupTable((SlotLedger(tier, size) for tier, size in self.sizes.items()), retains=retains)
        self.idle: list[Backup] = []  # least recently used first
        self.writes: list[list[Backup]] = []
        self.reads: list[list[Backup]] = []
        self.moves: list[list[tuple[Backup, Location]]] = []
        self.there = {tier: set(range(size)) for tier, size in self.sizes.items()}
        self.kept: Counter[Backup] = Counter()
        self.known: list[Backup] = []  # every backup ever made
        self.written: set[Backup] = set()
        self.lost: set[Backup] = set()

    def do(self, name: str, *args: object) -> None:
        """Apply one rule, and check the laws."""
        getattr(self, name)(*args)
        self.only_whole_backups_are_found()
        self.every_slot_has_one_tenant()

    def is_touched(self, backup: Backup) -> bool:
        return self.is_moving(backup) or any(backup in copy for copy in self.writes + self.reads)

    def is_moving(self, backup: Backup) -> bool:
        return any(backup is other for move in self.moves for other, _ in move)

    def is_alive(self, backup: Backup) -> bool:
        """Whether the backup can be found."""
        return backup not in self.lost and (self.kept[backup] > 0 or self.is_touched(backup) or backup in self.idle)

    def settle(self, touched: Iterable[Backup]) -> None:
        """A backup that no request keeps and no copy uses becomes idle if it is whole, else lost."""
        for backup in touched:
            if backup not in self.lost and not (self.kept[backup] or self.is_touched(backup)):
                stays = backup.location.slot in self.there[backup.location.tier]
                if self.retains and backup in self.written and not backup.is_private and stays:
                    self.idle.append(backup)
                else:
                    self.lost.add(backup)

    def tenants(self) -> list[Location]:
        """Return slots of backups and targets of moves in flight."""
        targets = [location for move in self.moves for _, location in move]
        return [b.location for b in self.known if self.is_alive(b) or self.is_touched(b)] + targets

    def wake(self, backups: Iterable[Backup]) -> None:
        self.idle = [backup for backup in self.idle if backup not in set(backups)]

    def make_room(self, tier: Tier, num_slots: int) -> bool:
        idle = [backup for backup in self.idle if backup.location.tier is tier]
        missing = num_slots - len(self.there[tier] - {tenant.slot for tenant in self.tenants() if tenant.tier is tier})
        if missing > len(idle):
            return False
        self.wake(idle[: max(0, missing)])
        self.lost.update(idle[: max(0, missing)])
        return True

    @rule(
        tier=st.sampled_from([Tier.HOST, Tier.PEER]),
        keys=st.lists(st.sampled_from(KEYS), unique=True),
        is_kept=st.booleans(),
        is_private=st.sampled_from([False, False, True]),
    )
    def begin_write(self, tier: Tier, keys: list[BlockKey], is_kept: bool = True, is_private: bool = False) -> None:
        keys = [key for key in keys if self.table.find(key) is None]
        backups = self.table.begin_write(tier, keys)
        assert (backups is not None) == self.make_room(tier, len(keys))
        if backups:
            assert [b.key for b in backups] == keys
            for backup in backups:
                backup.is_private = is_private
                if is_kept:
                    self.table.keep(backup)
            self.kept.update(backups if is_kept else [])
            self.known += backups
            self.writes.append(backups)

    @precondition(lambda self: self.writes)
    @rule(index=INDEX, ok=st.sampled_from([True, True, False]))
    def end_write(self, index: int, ok: bool) -> None:
        backups = self.writes.pop(index % len(self.writes))
        if ok:
            self.table.commit_write(backups)
            self.written.update(backups)
        else:
            self.table.abort_write(backups)
            self.lost.update(backups)
        self.settle(backups)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def begin_read(self, keys: list[BlockKey]) -> None:
        whole = [b for b in map(self.table.find_whole, keys) if b is not None]
        if whole:
            self.table.begin_read(whole)
            self.wake(whole)
            self.reads.append(whole)

    @precondition(lambda self: self.reads)
    @rule(index=INDEX)
    def finish_read(self, index: int) -> None:
        backups = self.reads.pop(index % len(self.reads))
        self.table.finish_read(backups)
        self.settle(backups)

    @rule(key=st.sampled_from(KEYS))
    def keep(self, key: BlockKey) -> None:
        backup = self.table.find(key)
        if backup is not None:
            self.table.keep(backup)
            self.wake([backup])
            self.kept[backup] += 1

    @precondition(lambda self: +self.kept)
    @rule(index=INDEX)
    def release(self, index: int) -> None:
        holders = sorted((+self.kept).elements(), key=self.known.index)
        backup = holders[index % len(holders)]
        self.kept[backup] -= 1
        self.table.release(backup)
        self.settle([backup])

    @rule(key=st.sampled_from(KEYS))
    def lose(self, key: BlockKey) -> None:
        backup = self.table.find_whole(key)
        if backup is not None:
            self.table.lose(backup)
            self.wake([backup])
            self.lost.add(backup)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True), tier=st.sampled_from([Tier.HOST, Tier.PEER]))
    def begin_move(self, keys: list[BlockKey], tier: Tier) -> None:
        whole = [b for b in map(self.table.find_whole, keys) if b is not None]
        whole = [b for b in whole if b.location.tier is not tier and not self.is_moving(b)]
        locations = self.table.begin_move(whole, tier)
        self.wake(whole)
        assert (locations is not None) == self.make_room(tier, len(whole))
        if locations is None:
            self.settle(whole)
        else:
            self.moves.append(list(zip(whole, locations, strict=True)))

    @precondition(lambda self: self.moves)
    @rule(index=INDEX, ok=st.sampled_from([True, True, False]))
    def end_move(self, index: int, ok: bool) -> None:
        for backup, target in self.moves.pop(index % len(self.moves)):
            before, is_read = backup.location, any(backup in copy for copy in self.reads)
            has_moved = self.table.finish_move(backup, ok)
            assert has_moved == (ok and backup not in self.lost and not is_read)
            assert backup.location == (target if has_moved else before)
            if not ok:
                self.lost.add(backup)
            self.settle([backup])

    @rule(tier=st.sampled_from([Tier.HOST, Tier.PEER]), num_slots=st.integers(1, 2))
    def add_slots(self, tier: Tier, num_slots: int) -> None:
        known = [tenant.slot for tenant in self.tenants() if tenant.tier is tier]
        first = 1 + max([-1, *self.there[tier], *known])
        new = range(first, first + num_slots)
        self.table.add_slots(tier, new)
        self.there[tier].update(new)

    @rule(tier=st.sampled_from([Tier.HOST, Tier.PEER]), slots=st.sets(st.integers(0, 7), max_size=3))
    def retire_slots(self, tier: Tier, slots: set[int]) -> None:
        gone = slots & self.there[tier]
        self.table.retire_slots(tier, gone)
        self.there[tier] -= gone
        idle = [b for b in self.idle if b.location.tier is tier and b.location.slot in gone]
        self.wake(idle)
        self.lost.update(idle)

    @invariant()
    def only_whole_backups_are_found(self) -> None:
        self.table.check_integrity()
        alive = {b.key: b for b in self.known if self.is_alive(b)}
        for key in KEYS:
            assert self.table.find(key) is alive.get(key)
            found = self.table.find_whole(key)
            assert found is (alive[key] if key in alive and alive[key] in self.written else None)

    @invariant()
    def every_slot_has_one_tenant(self) -> None:
        tenants = self.tenants()
        assert len(tenants) == len(set(tenants))
        for tier, there in self.there.items():
            taken = {tenant.slot for tenant in tenants if tenant.tier is tier}
            assert self.table.slots[tier].num_free == len(there - taken)
            assert self.table.slots[tier].num_slots == len(there)
            assert self.table.slots[tier].num_taken == len(taken)
            num_idle = sum(b.location.tier is tier for b in self.idle)
            assert self.table.num_idle(tier) == num_idle
            assert self.table.num_available(tier) == self.table.slots[tier].num_free + num_idle


BackupMachine.TestCase.settings = settings(
    max_examples=examples(40), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestBackupMachine = BackupMachine.TestCase


def tour(machine: BackupMachine) -> None:
    """Every case of the table once."""
    do = machine.do
    machine.begin(4, 0, True)
    do("begin_write", Tier.HOST, KEYS[:2])
    do("begin_read", KEYS[:2])  # nothing is whole yet
    do("release", 0)
    do("end_write", 0, True)
    do("begin_read", KEYS[1:2])
    do("lose", KEYS[1])  # while a copy reads it
    do("begin_write", Tier.HOST, KEYS[1:3])
    do("finish_read", 0)
    do("end_write", 0, False)
    do("keep", KEYS[1])
    do("begin_write", Tier.HOST, KEYS[:4])
    do("end_write", 0, True)
    do("begin_read", KEYS[:4])
    for _ in range(3):
        do("release", 0)
    do("finish_read", 0)
    while +machine.kept:
        do("release", 0)
    do("begin_read", KEYS[:1])  # the others are older now
    do("finish_read", 0)
    do("begin_write", Tier.HOST, KEYS[4:], False)  # no request keeps it, and it takes the slots of the oldest
    do("end_write", 0, True)


def move_tour(machine: BackupMachine) -> None:
    """Every case of a move between tiers."""
    do = machine.do
    machine.begin(4, 0, True)
    do("begin_write", Tier.HOST, KEYS[:3])
    do("end_write", 0, True)
    do("begin_move", KEYS[:2], Tier.PEER)  # no room
    do("add_slots", Tier.PEER, 2)
    do("begin_move", KEYS[:2], Tier.PEER)
    do("begin_read", KEYS[:1])
    do("end_move", 0, True)  # one is read, and is not moved
    do("finish_read", 0)
    do("begin_move", KEYS[:1], Tier.PEER)
    do("release", 0)  # no request keeps it while it moves
    do("end_move", 0, True)
    do("retire_slots", Tier.PEER, {0, 1})  # the idle one is dropped, the kept one remains
    do("begin_move", KEYS[1:2], Tier.HOST)
    do("end_move", 0, True)
    do("add_slots", Tier.PEER, 1)
    do("begin_move", KEYS[1:2], Tier.PEER)
    do("lose", KEYS[1])  # while it moves
    do("end_move", 0, True)
    do("begin_move", KEYS[2:3], Tier.PEER)
    do("end_move", 0, False)


def test_a_tour_of_every_move() -> None:
    move_tour(BackupMachine())


WRONG_MOVES = Controls(moves_what_is_read)
WRONG_MOVES.add(
    "keeps_what_lies_in_slots_that_go",
    BackupTable,
    "retire_slots",
    lambda _, b, tier, slots: b.slots[tier].retire(slots),
)
WRONG_MOVES.add(
    "trusts_a_move_that_failed", BackupTable, "finish_move", lambda finish, self, backup, _: finish(self, backup, True)
)


@pytest.mark.parametrize("fault", WRONG_MOVES)
def test_the_machine_notices_moves_that_are_wrong(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, InvariantError, KeyError)):
        move_tour(BackupMachine())


def test_a_tour_of_every_corner() -> None:
    tour(BackupMachine())


WRONG_TABLES = Controls(commits_what_failed, frees_slots_that_a_copy_reads)
WRONG_TABLES.add("answers_before_the_copy_arrived", BackupTable, "find_whole", lambda _, self, key: self.find(key))
WRONG_TABLES.add(
    "never_frees_what_was_lost", BackupTable, "_collect", lambda collect, self, b: b.is_lost or collect(self, b)
)
WRONG_TABLES.add("retains_backups_in_use", IdleBackups, "discard", lambda _, self, backup: None)
WRONG_TABLES.add("gives_a_slot_twice", SlotLedger, "free", lambda _, self, location: self._free.append(0))


@pytest.mark.parametrize("fault", WRONG_TABLES)
def test_the_machine_notices_a_table_that(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, InvariantError, KeyError)):
        tour(BackupMachine())


# -- pins against plain lists ------------------------------------------------------------------------------------------


PIN_KEYS = [BlockKey(bytes([n])) for n in range(8)]


class PinMachine(RuleBasedStateMachine):
    """Backups come to rest, are pinned, unpinned, and evicted for writes that need or only want their slots."""

    @initialize(num_slots=st.integers(1, 6))
    def begin(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.table = BackupTable([SlotLedger(Tier.HOST, num_slots)])
        self.pins: list[Pin] = []
        self.kept: list[Backup] = []

    @rule(keys=st.lists(st.sampled_from(PIN_KEYS), unique=True, max_size=4), is_kept=st.booleans())
    def write(self, keys: list[BlockKey], is_kept: bool) -> None:
        """A pin is never the reason that there is no slot: only backups that are in use are."""
        keys = [key for key in keys if self.table.find(key) is None]
        backups = self.table.begin_write(Tier.HOST, keys)
        assert (backups is not None) == (len(keys) <= self.num_slots - len(self.kept))
        self.settle(backups or [], is_kept)

    @rule(key=st.sampled_from(PIN_KEYS), below=st.sampled_from([0.0, 1.0, 2.0]))
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
        keys=st.lists(st.sampled_from(PIN_KEYS), unique=True, min_size=1, max_size=5),
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


def tour_of_pins(machine: PinMachine) -> None:
    """One pin of each tenant, pressure, and an end of each."""
    machine.begin(4)
    steps: list[tuple[Any, ...]] = [
        ("write", PIN_KEYS[:4], False),
        ("pin", PIN_KEYS[:2], 1.0, "a"),
        ("pin", PIN_KEYS[2:4], 2.0, "b"),
        ("write_if_cheap", PIN_KEYS[4], 1.0),
        ("write", PIN_KEYS[4:6], True),
        ("release", 0),
        ("unpin", 1),
        ("write", PIN_KEYS[5:8], True),
    ]
    for name, *args in steps:
        getattr(machine, name)(*args)
        machine.accounts_balance()


def test_a_tour_of_pins() -> None:
    machine = PinMachine()
    tour_of_pins(machine)


CONTROLS = Controls()
CONTROLS.add("refuses_what_is_pinned", IdleBackups, "find_victim", lambda find, *about: find(*about[:3], 0.0))
CONTROLS.add("evicts_for_what_is_only_wanted", IdleBackups, "find_victim", lambda find, *about: find(*about[:3]))
CONTROLS.add("has_no_shares", IdleBackups, "pin", lambda pin, idle, one, num_slots: pin(idle, one, 10**9))
CONTROLS.add("forgets_to_move", IdleBackups, "_move", lambda _, idle, key: None)


@pytest.mark.parametrize("fault", CONTROLS)
def test_the_laws_notice_a_table_that(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, InvariantError, StopIteration)):
        tour_of_pins(PinMachine())
        machine = PinMachine()
        machine.begin(4)
        machine.write(PIN_KEYS[:4], False)
        machine.pin(PIN_KEYS[:4], 1.0, "a")
        machine.pin(PIN_KEYS[4:8], 1.0, "b")
