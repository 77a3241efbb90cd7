"""Content keys of the prompt blocks that an instance was given: a guess of which prefixes it has cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from floodplain.core.hashing import BlockKey


class PrefixMemory:
    """The keys of the blocks that an instance was given last. It may have evicted them since.

    Args:
        max_keys: Most keys, as many as the instance has blocks; the oldest are dropped.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def count_known(self, keys: Sequence[BlockKey]) -> int:
        """The number of leading keys that are remembered."""
        return sum(1 for _ in takewhile(self._keys.__contains__, keys))

    def note(self, keys: Sequence[BlockKey]) -> None:
        """Add keys of blocks that the instance computes next."""
        for key in keys:
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)
