"""States of a block of the KV pool. It has exactly one at any time:

absent    no memory behind it: the pool shrank, or has not grown to it yet
free      memory without content
owned     refcount >= 1: sequences read it; shared only when it is full
cached    refcount 0, content indexed by key: a later prefix may revive it, an allocation may evict it (least
          recently used first)
loading   an inbound copy writes it; it must not be read
draining  refcount 0, but outbound copies (pins) still read it; free or cached at the last unpin
"""

from __future__ import annotations

from enum import Enum


class BlockState(Enum):
    """State of a block, as defined in the module's docstring."""

    ABSENT = "absent"
    FREE = "free"
    OWNED = "owned"
    CACHED = "cached"
    LOADING = "loading"
    DRAINING = "draining"
