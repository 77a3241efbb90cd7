from __future__ import annotations

import pytest

from floodplain.core.backups import BackupTable
from floodplain.core.errors import InvariantError
from floodplain.core.hashing import BlockKey
from floodplain.core.tiers import Location, SlotLedger, Tier

KEY = BlockKey(b"k")


def test_slots_are_given_all_or_none() -> None:
    slots = SlotLedger(Tier.HOST, 3)
    assert slots.allocate(4) is None
    assert slots.num_free == 3
    given = slots.allocate(3)
    assert given is not None and {location.slot for location in given} == {0, 1, 2}
    assert slots.allocate(1) is None
    assert slots.allocate(0) == []


@pytest.mark.parametrize("location", [Location(Tier.HOST, 0), Location(Tier.PEER, 1), Location(Tier.HOST, 9)])
def test_a_slot_that_is_not_taken_cannot_be_freed(location: Location) -> None:
    slots = SlotLedger(Tier.HOST, 2)
    taken = slots.allocate(2)
    assert taken is not None
    slots.free(Location(Tier.HOST, 0))
    with pytest.raises(InvariantError, match="freed but not taken"):
        slots.free(location)


def test_a_lost_slot_breaks_integrity() -> None:
    slots = SlotLedger(Tier.HOST, 2)
    slots.check_integrity()
    slots._fresh = slots._fresh[1:]
    with pytest.raises(InvariantError, match="lost or doubled"):
        slots.check_integrity()


def test_a_tier_that_is_not_there_has_no_room() -> None:
    assert BackupTable().begin_write(Tier.HOST, [KEY]) is None


def test_a_content_is_backed_up_once() -> None:
    table = BackupTable([SlotLedger(Tier.HOST, 4)])
    assert table.begin_write(Tier.HOST, [KEY]) is not None
    with pytest.raises(InvariantError, match="backed up twice"):
        table.begin_write(Tier.HOST, [KEY])


def test_a_backup_is_not_read_before_it_is_whole() -> None:
    table = BackupTable([SlotLedger(Tier.HOST, 4)])
    backups = table.begin_write(Tier.HOST, [KEY])
    assert backups is not None
    with pytest.raises(InvariantError, match="before it is whole"):
        table.begin_read(backups)


def test_releasing_more_often_than_keeping_breaks_integrity() -> None:
    table = BackupTable([SlotLedger(Tier.HOST, 4)])
    backups = table.begin_write(Tier.HOST, [KEY])
    assert backups is not None
    table.release(backups[0])  # the copy is still on its way, so the backup stays
    with pytest.raises(InvariantError, match="released more often"):
        table.check_integrity()
