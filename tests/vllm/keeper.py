"""Another connector, as operators run beside ours: keeps KV of all full blocks by their hashes, and loads it later."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
)

LOAD_STEPS = 3
"""Steps from a load's start until it writes."""


class Errands(KVConnectorMetadata):
    """Blocks to save, (hash, block) each, and blocks to load of each request."""

    def __init__(self, saves: list[tuple[bytes, int]], loads: dict[str, list[tuple[bytes, int]]]) -> None:
        self.saves, self.loads = saves, loads


class Keeper(KVConnectorBase_V1):
    """Scheduler and worker are in one process, and share ``kept``.

    Attributes:
        kept: KV by hash, one tensor for each layer.
        num_loaded: Requests that were loaded.
        num_loading: Requests that are.
    """

    kept: dict[bytes, list[torch.Tensor]] = {}  # noqa: RUF012
    num_loaded = num_loading = 0

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_tokens = vllm_config.cache_config.block_size
        self._requests: dict[str, Any] = {}
        self._num_local: dict[str, int] = {}
        self._to_load: dict[str, list[tuple[bytes, int]]] = {}
        self._loading: list[tuple[int, str, list[tuple[bytes, int]]]] = []
        self._step = 0

    # -- in the scheduler ----------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._manager = kv_cache_manager

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        first = num_computed_tokens // self._block_tokens
        keys = request.block_hashes[first : (request.num_tokens - 1) // self._block_tokens]
        num_found = next((place for place, key in enumerate(keys) if key not in self.kept), len(keys))
        self._num_local[request.request_id] = first
        return num_found * self._block_tokens, num_found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._requests[request.request_id] = request
        if num_external_tokens:
            first = self._num_local[request.request_id]
            end = first + num_external_tokens // self._block_tokens
            [ids] = blocks.get_block_ids()
            pairs = zip(request.block_hashes[first:end], ids[first:end], strict=True)
            self._to_load[request.request_id] = list(pairs)

    def build_connector_meta(self, scheduler_output: Any) -> Errands:
        saves = []
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[request_id]
            num_full = (request.num_computed_tokens + num_tokens) // self._block_tokens
            [ids] = self._manager.get_block_ids(request_id)
            pairs = zip(request.block_hashes[:num_full], ids, strict=False)
            saves += [(key, block) for key, block in pairs if key not in self.kept]
        loads, self._to_load = self._to_load, {}
        return Errands(saves, loads)

    def reset_cache(self) -> bool:
        self.kept.clear()
        return True

    # -- in the worker -------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        errands = self._get_connector_metadata()
        assert isinstance(errands, Errands)
        self._step += 1
        for request_id, pairs in errands.loads.items():
            data = [(self.kept[key], block) for key, block in pairs]
            self._loading.append((self._step + LOAD_STEPS, request_id, data))  # type: ignore[arg-type]
        Keeper.num_loading = len(self._loading)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        errands = self._get_connector_metadata()
        assert isinstance(errands, Errands)
        for key, block in errands.saves:
            self.kept[key] = [cache[block].clone() for cache in self._caches]

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        due = [load for load in self._loading if load[0] <= self._step]
        self._loading = [load for load in self._loading if load not in due]
        for _, _, data in due:
            for layers, block in data:
                for cache, layer in zip(self._caches, layers, strict=True):
                    cache[block] = layer
        Keeper.num_loaded += len(due)
        Keeper.num_loading = len(self._loading)
        return KVConnectorTransferResults(finished_recving={request_id for _, request_id, _ in due})
