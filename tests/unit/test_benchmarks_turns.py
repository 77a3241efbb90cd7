"""The baseline of ``benchmarks/turns``: copies of ended requests, the least recently used one evicted first."""

from __future__ import annotations

from benchmarks.turns.by_age import AgeOnly
from floodplain.core.backups import BackupTable
from floodplain.core.hashing import BlockKey
from floodplain.core.tiers import SlotLedger, Tier

KEYS = {name: [BlockKey(f"{name}{place}".encode()) for place in range(2)] for name in "abc"}


def serve(book: AgeOnly, backups: BackupTable, name: str, now: float) -> None:
    """Serve a session's request, and copy what has no copy."""
    one = book.arrive(name, "", KEYS[name], now)
    book.start(one, now)
    pin = book.end(one, KEYS[name], now)
    assert pin is not None
    missing = [key for key in pin.keys if backups.find(key) is None]
    backups.commit_write(backups.begin_write(Tier.HOST, missing, pin.worth) or [])


def test_a_session_that_was_served_again_outlasts_those_that_were_not() -> None:
    backups = BackupTable([SlotLedger(Tier.HOST, 4)])
    book = AgeOnly(backups)
    for now, name in enumerate("abac"):
        serve(book, backups, name, float(now))
    there = {name: [backups.find_whole(key) is not None for key in keys] for name, keys in KEYS.items()}
    assert there == {"a": [True, True], "b": [False, False], "c": [True, True]}


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    backups = BackupTable([SlotLedger(Tier.HOST, 4)])
    book = AgeOnly(backups)
    for now, name in enumerate("aab"):
        serve(book, backups, name, float(now))
    backups.begin_write(Tier.HOST, [BlockKey(b"new")])
    assert [backups.find_whole(key) is not None for key in KEYS["a"]] == [True, False]
