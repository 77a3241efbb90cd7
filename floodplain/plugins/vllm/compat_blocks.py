"""The part of ``compat`` that is about blocks: names of vLLM's block pool that it may change without notice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.request import Request

from floodplain.core.cache_groups import CacheGroup, CacheKind
from floodplain.core.request import SeqId
from floodplain.plugins.vllm.books import Tables
from floodplain.plugins.vllm.exclusive import ExclusiveCounts
from floodplain.plugins.vllm.prefix_index import NOTHING, Found, PrefixIndex


class WatchedPool(BlockPool):
    """vLLM's pool, which also reports changes of blocks' reference counts and contents.

    vLLM has no setting for its pool's class. So the existing pool's class is replaced, with the same attributes.
    """

    exclusive: ExclusiveCounts
    prefixes: PrefixIndex

    @staticmethod
    def watch(pool: Any, exclusive: ExclusiveCounts, prefixes: PrefixIndex) -> None:
        """Make a pool report to both from now on."""
        pool.__class__ = WatchedPool
        pool.exclusive, pool.prefixes = exclusive, prefixes

    def touch(self, blocks: Sequence[Any]) -> None:
        """Add a reference to each block, as vLLM does, and report them."""
        super().touch(blocks)
        self._note(blocks)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Drop a reference to each block, as vLLM does, and report them."""
        blocks = list(ordered_blocks)
        super().free_blocks(blocks)
        self._note(blocks)

    def unpin_blocks(self, blocks: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        """Unpin blocks, as vLLM does, and report them."""
        blocks = list(blocks)
        super().unpin_blocks(blocks, *args, **kwargs)
        self._note(blocks)

    def reset_prefix_cache(self) -> bool:
        """Reset the prefix cache, as vLLM does, and report it."""
        is_reset: bool = super().reset_prefix_cache()
        self.prefixes.note_reset()
        return is_reset

    def _insert_block_hash(self, block_hash_with_group_id: Any, *args: Any, **kwargs: Any) -> None:
        super()._insert_block_hash(block_hash_with_group_id, *args, **kwargs)
        self.prefixes.note_cached(get_block_hash(block_hash_with_group_id))

    def _remove_cached_block_hashes(self, block: Any) -> Any:
        self.prefixes.note_evicted(block)
        return super()._remove_cached_block_hashes(block)

    def _note(self, blocks: Sequence[Any]) -> None:
        self.exclusive.note(blocks)
        self.prefixes.note_held(blocks)


class BlockFinder:
    """Implements ``rows.Blocks`` with vLLM's KV cache manager.

    Prefixes are those of the first group with full attention: what other groups have of them is not looked up, so a
    prefix may turn out to be shorter. ``hash_tokens``: tokens of a block whose content vLLM hashes.
    """

    def __init__(self, manager: Any, groups: Sequence[CacheGroup], hash_tokens: int) -> None:
        self._manager = manager
        self.pool = manager.block_pool
        self._tables = [one.req_to_blocks for one in manager.coordinator.single_type_managers]
        first = next((number for number, group in enumerate(groups) if group.kind is CacheKind.FULL), None)
        self._first = first if first is not None and groups[first].block_tokens == hash_tokens else None
        self._exclusive, self._prefixes = ExclusiveCounts(), PrefixIndex(self._find)
        WatchedPool.watch(self.pool, self._exclusive, self._prefixes)

    @property
    def finds_all(self) -> bool:
        """Whether a full block's hash determines all that a request keeps of its tokens."""
        return len(self._tables) == 1 and self._first == 0

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks, without vLLM's null block."""
        return int(self.pool.num_gpu_blocks) - 1

    def count_free(self) -> int:
        """Return the number of free blocks."""
        return int(self.pool.get_num_free_blocks())

    def tables(self, request_id: str) -> Tables:
        """Return the block table of a request in each group; empty ones if it has none."""
        return [tables.get(request_id) or () for tables in self._tables]

    def count_exclusive(self, seq_id: SeqId, tables: Tables) -> int:
        """Return how many blocks of its tables only this request uses."""
        others = [table for number, table in enumerate(tables) if number != self._first]
        num_first = 0 if self._first is None else self._exclusive.count(seq_id, tables[self._first])
        return num_first + sum(bool(block.ref_cnt == 1 and not block.is_null) for table in others for block in table)

    def take_changed(self) -> Set[SeqId]:
        """Return requests whose exclusive blocks or prefix changed since the last call."""
        return self._exclusive.take_recounted() | self._prefixes.take_forgotten()

    def find_prefix(self, seq_id: SeqId, request: Request, most: int) -> Found:
        """Return the cached prefix of a request, at most ``most`` blocks."""
        if self._first is None or not self._manager.prefix_cache_lookup_enabled(request):
            return NOTHING
        hashes = request.block_hashes
        return self._prefixes.find(seq_id, hashes, min(most, len(hashes)))

    def watch_only(self, holding: Set[SeqId], absent: Set[SeqId]) -> None:
        """Stop watching all requests but those that hold blocks and those that are absent."""
        self._exclusive.keep_only(holding)
        self._prefixes.keep_only(absent)

    def _find(self, block_hash: Any) -> Any:
        cached = self.pool.get_cached_block(block_hash, [self._first])
        return None if cached is None else cached[0]
