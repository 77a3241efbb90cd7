"""Which prompts an instance has seen, as content keys of their blocks: where a prefix is probably cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from floodplain.core.hashing import BlockKey


class PrefixMemory:
    """The keys of the blocks that an instance was given last. A guess: the instance may have evicted them.

    Args:
        max_keys: The oldest are forgotten; as many as the instance has blocks.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def count_known(self, keys: Sequence[BlockKey]) -> int:
        """Leading keys that are remembered."""
        return sum(1 for _ in takewhile(self._keys.__contains__, keys))

    def note(self, keys: Sequence[BlockKey]) -> None:
        """These blocks are computed there next."""
        for key in keys:
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)
