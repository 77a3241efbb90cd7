"""How much of a request's beginning is in swap space, by content: looked up once, and again when copies of it change.

Keys are vLLM's own hashes of full blocks, which cover all tokens before, adapter, images and the ``cache_salt``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass

from floodplain.core.backups import Backup, BackupTable
from floodplain.core.hashing import BlockKey
from floodplain.core.request import SeqId
from floodplain.plugins.vllm.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class _Saved:
    """A content as ``PrefixIndex`` takes it: it has one copy, which no request holds as a block."""

    block_id: Hashable
    ref_cnt: int = 0


class SavedPrefixes:
    """Finds leading blocks of requests that have whole copies in ``backups``."""

    def __init__(self, backups: BackupTable) -> None:
        self._backups = backups
        self._index = PrefixIndex(self._find)
        self._version = backups.changed_keys.version

    def find(self, keys: Sequence[BlockKey]) -> list[Backup]:
        """Return the copies of the longest run of leading contents that have one now."""
        found: list[Backup] = []
        for key in keys:
            backup = self._backups.find_whole(key)
            if backup is None:
                break
            found.append(backup)
        return found

    def count(self, seq_id: SeqId, keys: Sequence[BlockKey], most: int) -> int:
        """Return the length of that run, at most ``most``, at the last ``refresh``.

        ``keys`` are of the request's full blocks, from the first on; only more can follow.
        """
        return self._index.find(seq_id, keys, min(most, len(keys))).num_blocks

    def refresh(self) -> set[SeqId]:
        """Apply changes of copies; return requests whose ``count`` may have changed since the last call."""
        log = self._backups.changed_keys
        changed, self._version = log.since(self._version), log.version
        if changed is None:
            self._index.note_reset()
        for key in changed or ():
            if self._backups.find_whole(key) is None:
                self._index.note_evicted(_Saved(key))
            else:
                self._index.note_cached(key)
        return self._index.take_forgotten()

    def keep_only(self, seq_ids: Set[SeqId]) -> None:
        """Forget all other requests."""
        self._index.keep_only(seq_ids)

    def _find(self, key: BlockKey) -> _Saved | None:
        return None if self._backups.find_whole(key) is None else _Saved(key)
