"""The ledger of KV blocks: which block is free, owned, cached, loading or draining, and what it holds.

States are in ``core.block_state``. Pins are orthogonal to the owner: a block is reused only after every copy that
touches it is done.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice, takewhile
from operator import is_not

from floodplain.core.block_state import BlockState
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId, FreeBlocks
from floodplain.core.hashing import BlockKey


class BlockLedger:
    """Owner of the states of all blocks of one KV pool. Pure bookkeeping: no bytes move here.

    Args:
        num_blocks: Blocks that have memory now.
        block_tokens: Tokens in a block.
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
        self.changed_keys: set[BlockKey] = set()
        """Contents that appeared, vanished, or became or ceased to be merely cached, until a reader clears it."""
        self.sharing_version = 0
        """Counts changes to which blocks are shared: what a preemption frees may differ when it has moved."""
        self._free = FreeBlocks(quantum_blocks)
        self._states: list[BlockState] = []
        self._refcounts: list[int] = []
        self._pins: list[int] = []
        self._keys: list[BlockKey | None] = []
        self._index: dict[BlockKey, BlockId] = {}
        self._cached: OrderedDict[BlockId, int] = OrderedDict()  # least recently used first; its place in that order
        self._going: dict[BlockId, int] = {}  # draining blocks that were cached, and will be again at their place
        self._num_present = self._num_draining = self._last_place = 0
        self.add_memory(range(num_blocks))

    # -- what is there ---------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Blocks that have memory."""
        return self._num_present

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can still give: the free ones and, by eviction, the cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that hold a reusable prefix and nothing else."""
        return len(self._cached)

    @property
    def num_draining(self) -> int:
        """Blocks that nobody holds and that an outbound copy still reads."""
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
        idle = (BlockState.ABSENT, BlockState.FREE)
        return [block for block, state in enumerate(self._states) if state not in idle]

    @property
    def num_empty(self) -> int:
        """Free blocks: what can be given without forgetting anything."""
        return len(self._free)

    def next_evicted(self, num_blocks: int) -> list[tuple[BlockId, BlockKey]]:
        """The next blocks that need would evict, with their content."""
        return [(block, key) for block in islice(self._cached, num_blocks) if (key := self._keys[block]) is not None]

    def state(self, block: BlockId) -> BlockState:
        """The state of a block."""
        return self._states[block]

    def refcount(self, block: BlockId) -> int:
        """How many sequences hold a block."""
        return self._refcounts[block]

    def count_exclusive(self, blocks: Iterable[BlockId]) -> int:
        """How many of these blocks become available when their one holder frees them."""
        refcounts, pins = self._refcounts, self._pins
        return sum(refcounts[block] == 1 and not pins[block] for block in blocks)

    def count_cached(self, blocks: Iterable[BlockId]) -> int:
        """How many of these blocks are cached: sharing them makes them unavailable to others."""
        return sum(map(self._cached.__contains__, blocks))

    def survey(self, first: int, num_blocks: int) -> tuple[int, int, bool]:
        """Of a run of blocks: how many have memory, how many of those are in use, whether a copy touches one.

        It runs over the whole pool at every shrink: hence no Python per block.
        """
        states = self._states[first : first + num_blocks]
        num_idle = states.count(BlockState.FREE)
        if num_idle == len(states):
            return num_idle, 0, False
        num_present = len(states) - states.count(BlockState.ABSENT)
        num_used = num_present - num_idle - states.count(BlockState.CACHED)
        is_held = any(self._pins[first : first + num_blocks])
        return num_present, num_used, is_held or states.count(BlockState.OWNED) < num_used

    def is_pinned(self, block: BlockId) -> bool:
        """Whether an outbound copy reads a block."""
        return self._pins[block] > 0

    def count_states(self) -> dict[BlockState, int]:
        """How many blocks are in each state (for metrics; walks all blocks)."""
        counts = dict.fromkeys(BlockState, 0)
        for state in self._states:
            counts[state] += 1
        return counts

    # -- owning ----------------------------------------------------------------------------------------------------

    def allocate(self, num_blocks: int) -> list[BlockId] | None:
        """Give ``num_blocks`` owned blocks with refcount 1, evicting cached ones at need; None if too few."""
        blocks = self._take(num_blocks, BlockState.OWNED)
        for block in blocks or ():
            self._refcounts[block] = 1
        return blocks

    def free(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference to each block of a sequence, given in its order.

        The tail goes first, so that least-recently-used eviction takes the leaves of a prefix tree before its roots.
        """
        for block in reversed(blocks):
            self._expect(block, BlockState.OWNED)
            self._refcounts[block] -= 1
            if self._refcounts[block] == 1:
                self.sharing_version += 1
            elif self._refcounts[block] == 0:
                self._settle(block)

    # -- prefixes --------------------------------------------------------------------------------------------------

    def seal(self, block: BlockId, key: BlockKey) -> None:
        """Say that an owned block is full of computed tokens with this content, so that others may share it.

        If another block has the same content already, that one stays the shared one.
        """
        self._expect(block, BlockState.OWNED)
        if key not in self._index:
            self._index[key] = block
            self._keys[block] = key
            self.changed_keys.add(key)

    def find(self, key: BlockKey) -> BlockId | None:
        """The readable block that holds this content, or None. Takes no reference."""
        return self._index.get(key)

    def find_prefix(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        """The readable blocks of these contents, up to the first that is missing.

        It runs over hundreds of keys for every waiting sequence that comes in sight: hence no Python per key.
        """
        return list(takewhile(partial(is_not, None), map(self._index.get, keys)))  # type: ignore[arg-type]

    def share(self, key: BlockKey) -> BlockId | None:
        """Take a reference to the block that holds this content, or None if there is none."""
        block = self._index.get(key)
        if block is None:
            return None
        if self._states[block] is not BlockState.OWNED:
            self._cached.pop(block, None)
            self._num_draining -= self._states[block] is BlockState.DRAINING
            self._states[block] = BlockState.OWNED
            self._going.pop(block, None)
            self.changed_keys.add(key)
        self._refcounts[block] += 1
        if self._refcounts[block] == 2:
            self.sharing_version += 1
        return block

    def share_owned(self, block: BlockId) -> None:
        """Take one more reference to an owned block."""
        self._expect(block, BlockState.OWNED)
        self._refcounts[block] += 1
        if self._refcounts[block] == 2:
            self.sharing_version += 1

    # -- copies in flight ------------------------------------------------------------------------------------------

    def pin(self, blocks: Iterable[BlockId]) -> None:
        """An outbound copy begins to read these owned blocks."""
        for block in blocks:
            self._expect(block, BlockState.OWNED)
            self._pins[block] += 1

    def pin_cached(self, blocks: Iterable[BlockId]) -> None:
        """An outbound copy begins to read these cached blocks. They keep their place in line."""
        for block in blocks:
            self._expect(block, BlockState.CACHED)
            self._going[block] = self._cached.pop(block)
            if (key := self._keys[block]) is not None:
                self.changed_keys.add(key)
            self._pins[block] += 1
            self._settle(block)

    def unpin(self, blocks: Sequence[BlockId]) -> None:
        """The outbound copy is done with these blocks, well or not. As in ``free``, the tail goes first."""
        returning = [block for block in blocks if block in self._going]
        for block in reversed(blocks):
            if self._pins[block] < 1:
                raise InvariantError(f"block {block} is unpinned but not pinned")
            self._pins[block] -= 1
            if self._states[block] is BlockState.DRAINING and not self._pins[block]:
                self._num_draining -= 1
                self._settle(block)
        if returning:
            self._put_back(returning)

    def begin_load(self, num_blocks: int) -> list[BlockId] | None:
        """Give blocks for an inbound copy to write, evicting cached ones at need; None if too few."""
        return self._take(num_blocks, BlockState.LOADING)

    def commit_load(self, blocks: Iterable[BlockId]) -> None:
        """The inbound copy arrived whole: its blocks are owned, with refcount 1."""
        for block in blocks:
            self._expect(block, BlockState.LOADING)
            self._states[block] = BlockState.OWNED
            self._refcounts[block] = 1

    def abort_load(self, blocks: Iterable[BlockId]) -> None:
        """The inbound copy failed or nobody wants it any more: its blocks are free."""
        for block in blocks:
            self._expect(block, BlockState.LOADING)
            self._settle(block)

    # -- elasticity (planned in core/shrink.py) --------------------------------------------------------------------

    def add_memory(self, blocks: Iterable[int]) -> None:
        """Memory appeared behind these absent blocks: they are free."""
        for index in blocks:
            self._extend_to(index + 1)
            block = BlockId(index)
            self._expect(block, BlockState.ABSENT)
            self._states[block] = BlockState.FREE
            self._free.add(block)
            self._num_present += 1

    def retire(self, block: BlockId) -> None:
        """Take a free or cached block out of use: its memory is about to go."""
        if self._states[block] is BlockState.CACHED:
            self._evict(block)
        self._expect(block, BlockState.FREE)
        self._free.remove(block)
        self._states[block] = BlockState.ABSENT
        self._num_present -= 1

    def reserve(self, block: BlockId) -> None:
        """Take a certain free or cached block as the destination of a move; it is loading until ``move``."""
        if self._states[block] is BlockState.CACHED:
            self._evict(block)
        self._expect(block, BlockState.FREE)
        self._free.remove(block)
        self._states[block] = BlockState.LOADING

    def move(self, source: BlockId, destination: BlockId) -> None:
        """The bytes of ``source`` are at ``destination`` now: references and key follow, ``source`` is free."""
        self._expect(source, BlockState.OWNED)
        self._expect(destination, BlockState.LOADING)
        if self._pins[source]:
            raise InvariantError(f"block {source} is moved while a copy reads it")
        self._states[destination] = BlockState.OWNED
        self._refcounts[destination], self._refcounts[source] = self._refcounts[source], 0
        key = self._keys[source]
        self._keys[destination], self._keys[source] = key, None
        if key is not None:
            self._index[key] = destination
        self._settle(source)

    # -- the law ---------------------------------------------------------------------------------------------------

    def check_integrity(self, references: Iterable[Sequence[BlockId]] | None = None) -> None:
        """Check every conservation law of the ledger; with ``references``, refcounts against all block tables.

        Raises:
            InvariantError: A law is broken; the message names it.
        """
        counted = [0] * len(self._states)
        for table in references if references is not None else ():
            for block in table:
                counted[block] += 1
        for index, state in enumerate(self._states):
            block = BlockId(index)
            if references is not None and counted[index] != self._refcounts[index]:
                raise InvariantError(f"block {block}: {self._refcounts[index]} references, {counted[index]} held")
            if not self._is_consistent(block, state):
                raise InvariantError(f"block {block} is {state} but its fields disagree")
        if any(self._keys[block] != key for key, block in self._index.items()):
            raise InvariantError("the index names a block that holds other content")
        if self._num_present != sum(state is not BlockState.ABSENT for state in self._states):
            raise InvariantError("the number of present blocks is wrong")
        if self._num_draining != sum(state is BlockState.DRAINING for state in self._states):
            raise InvariantError("the number of draining blocks is wrong")

    def _is_consistent(self, block: BlockId, state: BlockState) -> bool:
        refcount, pins, key = self._refcounts[block], self._pins[block], self._keys[block]
        return (
            (block in self._free) == (state is BlockState.FREE)
            and (block in self._cached) == (state is BlockState.CACHED)
            and (refcount > 0) == (state is BlockState.OWNED)
            and (pins == 0 or state in (BlockState.OWNED, BlockState.DRAINING))
            and (pins > 0 or state is not BlockState.DRAINING)
            and (key is None or self._index.get(key) == block)
            and (key is None or state in (BlockState.OWNED, BlockState.CACHED, BlockState.DRAINING))
            and (key is not None or state is not BlockState.CACHED)
            and (state is BlockState.DRAINING or block not in self._going)
        )

    # -- inside ----------------------------------------------------------------------------------------------------

    def _expect(self, block: BlockId, state: BlockState) -> None:
        if self._states[block] is not state:
            raise InvariantError(f"block {block} is {self._states[block].value}, not {state.value}")

    def _take(self, num_blocks: int, state: BlockState) -> list[BlockId] | None:
        if num_blocks > self.num_available:
            return None
        while len(self._free) < num_blocks:
            self._evict(next(iter(self._cached)))
        blocks = [self._free.pop() for _ in range(num_blocks)]
        for block in blocks:
            self._states[block] = state
        return blocks

    def _settle(self, block: BlockId) -> None:
        """Nobody holds the block any more: drain, cache or free it."""
        if self._pins[block]:
            self._states[block] = BlockState.DRAINING
            self._num_draining += 1
        elif self.caches_prefixes and (key := self._keys[block]) is not None:
            self._states[block] = BlockState.CACHED
            self._last_place += 1
            self._cached[block] = self._going.pop(block, self._last_place)
            self.changed_keys.add(key)
        else:
            self._forget_key(block)
            self._states[block] = BlockState.FREE
            self._free.add(block)

    def _put_back(self, blocks: Iterable[BlockId]) -> None:
        """Cached blocks that are last in line, since they were just added, go to their places."""
        places = self._cached
        latest = max(places[block] for block in blocks)
        front = {*takewhile(lambda block: places[block] < latest, places), *blocks}
        for block in sorted(front, key=places.__getitem__, reverse=True):
            places.move_to_end(block, last=False)

    def _evict(self, block: BlockId) -> None:
        del self._cached[block]
        self._forget_key(block)
        self._states[block] = BlockState.FREE
        self._free.add(block)

    def _forget_key(self, block: BlockId) -> None:
        key = self._keys[block]
        if key is not None:
            del self._index[key]
            self._keys[block] = None
            self.changed_keys.add(key)

    def _extend_to(self, num_blocks: int) -> None:
        missing = num_blocks - len(self._states)
        if missing > 0:
            self._states += [BlockState.ABSENT] * missing
            self._refcounts += [0] * missing
            self._pins += [0] * missing
            self._keys += [None] * missing
