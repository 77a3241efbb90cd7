"""Faults of the table of backups: negative controls of its own laws and of those over real bytes."""

from __future__ import annotations

import pytest

from floodplain.core.backups import Backup, BackupTable
from tests.support.controls import Broken, breaks


def commits_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackupTable, "abort_write", BackupTable.commit_write)


@breaks(BackupTable, "finish_move")
def moves_what_is_read(finish_move: Broken, self: BackupTable, backup: Backup, ok: bool) -> bool:
    readers, backup.num_readers = backup.num_readers, 0
    has_moved = finish_move(self, backup, ok)
    backup.num_readers = readers
    return has_moved


@breaks(BackupTable, "_collect")
def frees_slots_that_a_copy_reads(collect: Broken, self: BackupTable, backup: Backup) -> None:
    readers, backup.num_readers = backup.num_readers, 0
    collect(self, backup)
    backup.num_readers = readers
