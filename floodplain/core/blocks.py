"""The ledger of KV blocks: the state and the content key of each block.

Pins are independent of owners: a block is reused only after every copy that touches it has ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import partial
from itertools import islice, repeat, takewhile
from operator import is_not

from floodplain.core.changes import ChangeLog
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId, FreeBlocks
from floodplain.core.hashing import BlockKey


class BlockState(Enum):
    """State of a block of the KV pool."""

    ABSENT = "absent"
    """No memory behind it: the pool shrank, or has not grown to it yet."""
    FREE = "free"
    """Memory without content."""
    OWNED = "owned"
    """Refcount >= 1: sequences read it; shared only when it is full."""
    CACHED = "cached"
    """Refcount 0, content indexed by key: a later prefix may revive it, an allocation may evict it (LRU)."""
    LOADING = "loading"
    """An inbound copy writes it; it must not be read."""
    DRAINING = "draining"
    """Refcount 0, but outbound copies (pins) still read it; free or cached at the last unpin."""


_STATES = tuple(BlockState)
_ABSENT, _FREE, _OWNED, _CACHED, _LOADING, _DRAINING = range(len(_STATES))
"""A byte for each state: the ledger of millions of blocks is made in milliseconds."""


class BlockLedger:
    """Owner of the states of all blocks of one KV pool. Pure bookkeeping: no bytes move here.

    Args:
        num_blocks: Blocks that have memory now.
        quantum_blocks: Blocks whose pages are unmapped together; the pool shrinks by whole quanta.
        caches_prefixes: Whether freed blocks keep their content for later prefixes.
    """

    def __init__(
        self, num_blocks: int, block_tokens: int, *, quantum_blocks: int = 1, caches_prefixes: bool = True
    ) -> None:
        if num_blocks < 0 or block_tokens < 1 or quantum_blocks < 1:
            raise InvariantError(f"impossible pool: {num_blocks=} {block_tokens=} {quantum_blocks=}")
        self.block_tokens = block_tokens
        self.quantum_blocks = quantum_blocks
        self.caches_prefixes = caches_prefixes
        self.changed_keys: ChangeLog[BlockKey] = ChangeLog()
        """Contents that appeared, vanished, or became or ceased to be merely cached."""
        self.settled_quanta: set[int] = set()
        """Quanta in which a use of a block has ended, until a reader clears it: some memory there may be idle."""
        self.sharing_version = 0
        """Counts changes to which blocks are shared: after one, preemptions may free other numbers of blocks."""
        self._free = FreeBlocks(quantum_blocks)
        self._states = bytearray()
        self._refcounts: list[int] = []
        self._pins: dict[BlockId, int] = {}  # of blocks that copies read
        self._keys: dict[BlockId, BlockKey] = {}
        self._index: dict[BlockKey, BlockId] = {}
        self._cached: OrderedDict[BlockId, int] = OrderedDict()  # least recently used first; its place in that order
        self._going: dict[BlockId, int] = {}  # draining blocks that were cached, and return to their place
        self._num_present = self._num_loading = self._num_draining = self._last_place = 0
        self.add_memory(range(num_blocks))

    # -- queries ---------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Blocks that have memory."""
        return self._num_present

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free ones and, by eviction, cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Number of cached blocks."""
        return len(self._cached)

    @property
    def num_draining(self) -> int:
        """Blocks with refcount 0 that an outbound copy still reads."""
        return self._num_draining

    @property
    def num_indexed_blocks(self) -> int:
        """One more than the highest block that ever had memory."""
        return len(self._states)

    def cached_blocks(self) -> list[BlockId]:
        """The cached blocks, least recently used first."""
        return list(self._cached)

    def blocks_with_content(self) -> list[int]:
        """All blocks but absent and free ones, in ascending order: their bytes may still be read."""
        idle = (_ABSENT, _FREE)
        return [block for block, state in enumerate(self._states) if state not in idle]

    @property
    def num_empty(self) -> int:
        """Free blocks: those that can be allocated without an eviction."""
        return len(self._free)

    def next_evicted(self, num_blocks: int) -> list[tuple[BlockId, BlockKey]]:
        """The cached blocks that are evicted next, with their content keys."""
        return [(block, self._keys[block]) for block in islice(self._cached, num_blocks)]

    def state(self, block: BlockId) -> BlockState:
        """The state of a block."""
        return _STATES[self._states[block]]

    def refcount(self, block: BlockId) -> int:
        """How many sequences hold a block."""
        return self._refcounts[block]

    def count_exclusive(self, blocks: Iterable[BlockId]) -> int:
        """How many of these blocks have refcount 1 and no pin, so that they become available when freed."""
        refcounts, pins = self._refcounts, self._pins
        return sum(refcounts[block] == 1 and block not in pins for block in blocks)

    def count_cached(self, blocks: Iterable[BlockId]) -> int:
        """How many of these blocks are cached: sharing them makes them unavailable to others."""
        return sum(map(self._cached.__contains__, blocks))

    def survey(self, first: int, num_blocks: int) -> tuple[int, int, bool]:
        """(blocks with memory, used blocks, whether a copy touches one) of a run of blocks; no Python per block."""
        states = self._states[first : first + num_blocks]
        num_idle = states.count(_FREE)
        if num_idle == len(states):
            return num_idle, 0, False
        num_present = len(states) - states.count(_ABSENT)
        num_used = num_present - num_idle - states.count(_CACHED)
        is_held = not self._pins.keys().isdisjoint(range(first, first + num_blocks))
        return num_present, num_used, is_held or states.count(_OWNED) < num_used

    def count_states(self) -> dict[BlockState, int]:
        """Number of blocks in each state, in constant time. Approximate on another thread than the step's."""
        counts = {
            BlockState.ABSENT: len(self._states) - self._num_present,
            BlockState.FREE: len(self._free),
            BlockState.CACHED: len(self._cached),
            BlockState.LOADING: self._num_loading,
            BlockState.DRAINING: self._num_draining,
        }
        return {**counts, BlockState.OWNED: max(0, len(self._states) - sum(counts.values()))}

    # -- owning ----------------------------------------------------------------------------------------------------

    def allocate(self, num_blocks: int) -> list[BlockId] | None:
        """Allocate ``num_blocks`` owned blocks with refcount 1, evicting cached ones at need; None if too few."""
        blocks = self._take(num_blocks, _OWNED)
        for block in blocks or ():
            self._refcounts[block] = 1
        return blocks

    def free(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference to each block of a sequence, given in its order.

        The tail goes first, so that LRU eviction takes the leaves of a prefix tree before its roots.
        """
        for block in reversed(blocks):
            self._expect(block, _OWNED)
            self._refcounts[block] -= 1
            if self._refcounts[block] == 1:
                self.sharing_version += 1
            elif self._refcounts[block] == 0:
                self._settle(block)

    # -- prefixes --------------------------------------------------------------------------------------------------

    def seal(self, block: BlockId, key: BlockKey) -> None:
        """Register an owned block of computed tokens under its content key; an earlier block of it stays shared."""
        self._expect(block, _OWNED)
        if key not in self._index:
            self._index[key] = block
            self._keys[block] = key
            self.changed_keys.add(key)

    def find(self, key: BlockKey) -> BlockId | None:
        """The readable block that holds this content, or None. Takes no reference."""
        return self._index.get(key)

    def find_prefix(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        """The readable blocks of these contents, up to the first missing one. Runs are long: no Python per key."""
        return list(takewhile(partial(is_not, None), map(self._index.get, keys)))  # type: ignore[arg-type]

    def share(self, key: BlockKey) -> BlockId | None:
        """Take a reference to the block that holds this content, or None if there is none."""
        block = self._index.get(key)
        if block is None:
            return None
        if self._states[block] != _OWNED:
            self._cached.pop(block, None)
            self._num_draining -= self._states[block] == _DRAINING
            self._states[block] = _OWNED
            self._going.pop(block, None)
            self.changed_keys.add(key)
        self._refcounts[block] += 1
        if self._refcounts[block] == 2:
            self.sharing_version += 1
        return block

    def share_owned(self, block: BlockId) -> None:
        """Take one more reference to an owned block."""
        self._expect(block, _OWNED)
        self._refcounts[block] += 1
        if self._refcounts[block] == 2:
            self.sharing_version += 1

    # -- copies in flight ------------------------------------------------------------------------------------------

    def pin(self, blocks: Iterable[BlockId]) -> None:
        """Pin owned blocks that an outbound copy begins to read."""
        for block in blocks:
            self._expect(block, _OWNED)
            self._pins[block] = self._pins.get(block, 0) + 1

    def pin_cached(self, blocks: Iterable[BlockId]) -> None:
        """Pin cached blocks that an outbound copy begins to read. They keep their place in the eviction order."""
        for block in blocks:
            self._expect(block, _CACHED)
            self._going[block] = self._cached.pop(block)
            self.changed_keys.add(self._keys[block])
            self._pins[block] = self._pins.get(block, 0) + 1
            self._settle(block)

    def pin_contents(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        """Pin the readable blocks of contents that an outbound copy begins to read; return them. Evicted last."""
        blocks = [block for key in keys if (block := self.share(key)) is not None]
        self.pin(blocks)
        self.free(blocks)
        return blocks

    def unpin(self, blocks: Sequence[BlockId]) -> None:
        """Unpin blocks after an outbound copy, successful or not. As in ``free``, the tail goes first."""
        returning = [block for block in blocks if block in self._going]
        for block in reversed(blocks):
            num_pins = self._pins.pop(block, 0)
            if num_pins < 1:
                raise InvariantError(f"block {block} is unpinned but not pinned")
            if num_pins > 1:
                self._pins[block] = num_pins - 1
            elif self._states[block] == _DRAINING:
                self._num_draining -= 1
                self._settle(block)
        if returning:
            self._put_back(returning)

    def begin_load(self, num_blocks: int) -> list[BlockId] | None:
        """Allocate blocks for an inbound copy to write, evicting cached ones at need; None if too few."""
        return self._take(num_blocks, _LOADING)

    def commit_load(self, blocks: Iterable[BlockId]) -> None:
        """Make loading blocks owned, with refcount 1, after their inbound copy arrived whole."""
        for block in blocks:
            self._expect(block, _LOADING)
            self._num_loading -= 1
            self._states[block] = _OWNED
            self._refcounts[block] = 1

    def abort_load(self, blocks: Iterable[BlockId]) -> None:
        """Free loading blocks whose inbound copy failed or is no longer needed."""
        for block in blocks:
            self._expect(block, _LOADING)
            self._num_loading -= 1
            self._settle(block)

    # -- elasticity (planned in core/shrink.py) --------------------------------------------------------------------

    def add_memory(self, blocks: Iterable[int]) -> None:
        """Make absent blocks free after memory was mapped behind them. A range takes no Python per block."""
        for run in (blocks,) if isinstance(blocks, range) else (range(block, block + 1) for block in blocks):
            self._extend_to(run.stop)
            if self._states[run.start : run.stop].count(_ABSENT) < len(run):
                raise InvariantError(f"some of the blocks {run.start} to {run.stop - 1} have memory already")
            self._states[run.start : run.stop] = bytes((_FREE,)) * len(run)
            self._free.add_run(run)
            self._num_present += len(run)

    def retire(self, block: BlockId) -> None:
        """Make a free or cached block absent: its memory is about to be unmapped."""
        if self._states[block] == _CACHED:
            self._evict(block)
        self._expect(block, _FREE)
        self._free.remove(block)
        self._states[block] = _ABSENT
        self._num_present -= 1

    def empty_quantum(self, quantum: int) -> bool:
        """If no block of a quantum is in use or touched by a copy, evict its cached blocks; return whether so."""
        first = quantum * self.quantum_blocks
        _, num_used, is_held = self.survey(first, self.quantum_blocks)
        if num_used or is_held:
            return False
        for block in range(first, min(first + self.quantum_blocks, len(self._states))):
            if self._states[block] == _CACHED:
                self._evict(BlockId(block))
        return True

    def reserve(self, block: BlockId) -> None:
        """Reserve a certain free or cached block as the destination of a move; it is loading until ``move``."""
        if self._states[block] == _CACHED:
            self._evict(block)
        self._expect(block, _FREE)
        self._free.remove(block)
        self._num_loading += 1
        self._states[block] = _LOADING

    def move(self, source: BlockId, destination: BlockId) -> None:
        """Transfer references and key to ``destination``, which has the bytes now; ``source`` becomes free."""
        self._expect(source, _OWNED)
        self._expect(destination, _LOADING)
        if source in self._pins:
            raise InvariantError(f"block {source} is moved while a copy reads it")
        self._states[destination] = _OWNED
        self._refcounts[destination], self._refcounts[source] = self._refcounts[source], 0
        self._num_loading -= 1
        key = self._keys.pop(source, None)
        if key is not None:
            self._keys[destination], self._index[key] = key, destination
        self._settle(source)

    # -- the law ---------------------------------------------------------------------------------------------------

    def check_integrity(self, references: Iterable[Sequence[BlockId]] | None = None) -> None:
        """Raise InvariantError if a law is broken; ``references``, all block tables, are to check refcounts."""
        counted = [0] * len(self._states)
        for table in references if references is not None else ():
            for block in table:
                counted[block] += 1
        for index, state in enumerate(self._states):
            block = BlockId(index)
            if references is not None and counted[index] != self._refcounts[index]:
                raise InvariantError(f"block {block}: {self._refcounts[index]} references, {counted[index]} held")
            if not self._is_consistent(block, state):
                raise InvariantError(f"block {block} is {_STATES[state].value} but its fields disagree")
        if any(self._keys.get(block) != key for key, block in self._index.items()):
            raise InvariantError("the index names a block that holds other content")
        if self._num_present != len(self._states) - self._states.count(_ABSENT):
            raise InvariantError("the number of present blocks is wrong")
        for state, number in ((_DRAINING, self._num_draining), (_LOADING, self._num_loading)):
            if number != self._states.count(state):
                raise InvariantError(f"the number of {_STATES[state].value} blocks is wrong")

    def _is_consistent(self, block: BlockId, state: int) -> bool:
        refcount, pins, key = self._refcounts[block], self._pins.get(block, 0), self._keys.get(block)
        return (
            (block in self._free) == (state == _FREE)
            and (block in self._cached) == (state == _CACHED)
            and (refcount > 0) == (state == _OWNED)
            and (pins == 0 or state in (_OWNED, _DRAINING))
            and (pins > 0 or state != _DRAINING)
            and (key is None or self._index.get(key) == block)
            and (key is None or state in (_OWNED, _CACHED, _DRAINING))
            and (key is not None or state != _CACHED)
            and (state == _DRAINING or block not in self._going)
        )

    # -- inside ----------------------------------------------------------------------------------------------------

    def _expect(self, block: BlockId, state: int) -> None:
        if self._states[block] != state:
            raise InvariantError(f"block {block} is {self.state(block).value}, not {_STATES[state].value}")

    def _take(self, num_blocks: int, state: int) -> list[BlockId] | None:
        if num_blocks > self.num_available:
            return None
        while len(self._free) < num_blocks:
            self._evict(next(iter(self._cached)))
        blocks = [self._free.pop() for _ in range(num_blocks)]
        for block in blocks:
            self._states[block] = state
        if state == _LOADING:
            self._num_loading += num_blocks
        return blocks

    def _settle(self, block: BlockId) -> None:
        """Drain, cache or free a block without references."""
        self.settled_quanta.add(block // self.quantum_blocks)
        if block in self._pins:
            self._states[block] = _DRAINING
            self._num_draining += 1
        elif self.caches_prefixes and (key := self._keys.get(block)) is not None:
            self._states[block] = _CACHED
            self._last_place += 1
            self._cached[block] = self._going.pop(block, self._last_place)
            self.changed_keys.add(key)
        else:
            self._forget_key(block)
            self._states[block] = _FREE
            self._free.add(block)

    def _put_back(self, blocks: Iterable[BlockId]) -> None:
        """Move cached blocks that were just added at the end to their earlier places in the eviction order."""
        places = self._cached
        latest = max(places[block] for block in blocks)
        front = {*takewhile(lambda block: places[block] < latest, places), *blocks}
        for block in sorted(front, key=places.__getitem__, reverse=True):
            places.move_to_end(block, last=False)

    def _evict(self, block: BlockId) -> None:
        del self._cached[block]
        self._forget_key(block)
        self._states[block] = _FREE
        self._free.add(block)

    def _forget_key(self, block: BlockId) -> None:
        key = self._keys.pop(block, None)
        if key is not None:
            del self._index[key]
            self.changed_keys.add(key)

    def _extend_to(self, num_blocks: int) -> None:
        missing = num_blocks - len(self._states)
        if missing > 0:
            self._states += bytes(missing)
            self._refcounts.extend(repeat(0, missing))
