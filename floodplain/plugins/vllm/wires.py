"""vLLM's KV connector: the wires between our scheduler side (``desk``) and our worker side (``worker``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from floodplain.core.errors import UserError
from floodplain.plugins.vllm.cache_blocks import CacheBlocks
from floodplain.plugins.vllm.compat_names import count_block_bytes, find_cache_problem
from floodplain.plugins.vllm.connector import check_config
from floodplain.plugins.vllm.desk import SwapDesk
from floodplain.plugins.vllm.messages import StepOrders, WorkerReport
from floodplain.plugins.vllm.metrics import FloodplainMetrics, FloodplainStats
from floodplain.plugins.vllm.refusal import refusals_in_one_line
from floodplain.plugins.vllm.settings import read_settings
from floodplain.plugins.vllm.worker import SwapWorker, find_worker, introduce

if TYPE_CHECKING:
    import torch

    from floodplain.lending.peer_parts import PeerParts


class Orders(KVConnectorMetadata):
    """Carries ``StepOrders``."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


class WorkerMessage(KVConnectorWorkerMetadata):
    """Carries a ``WorkerReport``."""

    def __init__(self, report: WorkerReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMessage:
        """See vLLM: what several workers say in one step."""
        assert isinstance(other, WorkerMessage)
        return WorkerMessage(self.report.merge(other.report))


class FloodplainConnector(KVConnectorBase_V1):
    """What ``--kv-transfer-config`` names."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._engine_id = str(transfer.engine_id)
        self._desk: SwapDesk | None = None
        self._worker: SwapWorker | None = None
        problem = _find_problem(vllm_config, kv_cache_config.kv_cache_groups)
        self._is_refused = problem is not None
        if problem is not None and role is KVConnectorRole.WORKER:
            return  # the scheduler's side comes next, and says it once
        with refusals_in_one_line():
            if problem is not None:
                raise UserError(problem)
            self._settings = read_settings(transfer.kv_connector_extra_config)
            group = kv_cache_config.kv_cache_groups[0]
            self._block_tokens = int(group.kv_cache_spec.block_size)
            self._num_blocks = int(kv_cache_config.num_blocks)
            block_bytes = count_block_bytes(group)
            self._num_slots = self._settings.swap_bytes // block_bytes
            if role is KVConnectorRole.SCHEDULER:
                num_workers = vllm_config.parallel_config.tensor_parallel_size
                peer = None if self._settings.coordinator is None else self._find_peer()
                self._desk = SwapDesk(self._settings, block_bytes, self._block_tokens, num_workers, peer)

    def _find_peer(self) -> PeerParts:
        """What the worker of this process has for memory on neighbours."""
        worker = find_worker(self._engine_id)
        if worker is None or worker.peer is None:
            raise UserError("floodplain finds no worker of vLLM in the scheduler's process: leave coordinator out")
        return worker.peer

    @property
    def requires_kv_delivery(self) -> bool:
        """See vLLM: a copy that is lost is computed again."""
        return False

    # -- metrics ---------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> FloodplainStats:
        """See vLLM: each side counts what it sees."""
        return FloodplainStats(data=(self._desk or self._require_worker()).tally.take())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FloodplainStats:
        """See vLLM."""
        return FloodplainStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> FloodplainMetrics:
        """See vLLM."""
        return FloodplainMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- in the scheduler ------------------------------------------------------------------------------------------

    @property
    def desk(self) -> SwapDesk:
        """Of the scheduler's process."""
        assert self._desk is not None, "asked in a worker"
        return self._desk

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """See vLLM: everything is there now, and memory may be borrowed."""
        self.desk.books.bind(gpu_block_pool)
        worker, borrowing = find_worker(self._engine_id), self.desk.borrowing
        if worker is not None and borrowing is not None:
            worker.before_close = borrowing.retire
            with refusals_in_one_line():
                borrowing.start()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM: its blocks can go; copies that still read some hold those."""
        return False, None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See vLLM: all but the last token, which is computed again for what follows it."""
        one = self.desk.roster[request.request_id]
        one.note_local(num_computed_tokens)
        num_more = min(self.desk.books.count_restorable(one), request.num_tokens - 1) - num_computed_tokens
        return (num_more, True) if num_more > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See vLLM: it has the blocks into which it is restored."""
        if num_external_tokens:
            one = self.desk.roster[request.request_id]
            num_tokens = one.num_local_tokens + num_external_tokens
            self.desk.books.fetch(one, blocks.blocks[0], one.num_local_tokens, num_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See vLLM."""
        return Orders(self.desk.take_orders(is_idle=not scheduler_output.total_num_scheduled_tokens))

    def update_connector_output(self, connector_output: Any) -> None:
        """See vLLM."""
        said = connector_output.kv_connector_worker_meta
        if said is not None:
            self.desk.note_report(said.report)

    def has_pending_block_frees(self) -> bool:
        """See vLLM: then it waits for a copy instead of sending one more request away."""
        return self.desk.books.num_draining_blocks > 0

    def has_pending_push_work(self) -> bool:
        """See vLLM: steps go on until copies have ended, which hold blocks."""
        return self.desk.books.num_in_flight > 0

    def reset_cache(self) -> bool | None:
        """See vLLM: what was computed with other weights is worth nothing."""
        self.desk.forget_all()
        return True

    # -- in a worker -----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See vLLM."""
        if self._is_refused:
            return  # the scheduler's side says so next
        settings = self._settings
        default_bytes = settings.swap_bytes if settings.peer_bytes is None else settings.peer_bytes
        with refusals_in_one_line():
            blocks = CacheBlocks(kv_caches, self._num_blocks, self._block_tokens)
            self._worker = SwapWorker(blocks, self._num_slots, default_bytes if settings.coordinator else 0)
        introduce(self._engine_id, self._worker)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """See vLLM, from 0.33 on: the KV cache may be unmapped and mapped again at the same addresses."""
        return True

    def unregister_kv_caches(self) -> None:
        """See vLLM, from 0.33 on: after this no copy touches the KV cache until the next step."""
        if self._worker is not None:
            self._worker.drain()

    def restore_kv_caches(self) -> None:
        """See vLLM, from 0.33 on: addresses are those from before."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """See vLLM: called before each step computes; copies run beside it."""
        assert isinstance(kv_connector_metadata, Orders)
        self._require_worker().begin(kv_connector_metadata.orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See vLLM: called after each step."""
        arrived, failed = self._require_worker().finish()
        return KVConnectorTransferResults(finished_recving=arrived, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See vLLM."""
        return WorkerMessage(self._require_worker().take_report())

    def _require_worker(self) -> SwapWorker:
        assert self._worker is not None, "asked before vLLM's caches were there, or in the scheduler"
        return self._worker

    def shutdown(self) -> None:
        """See vLLM."""
        if self._worker is not None:
            self._worker.close()
        if self._desk is not None and self._desk.borrowing is not None:
            self._desk.borrowing.close()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See vLLM: copies have begun already."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See vLLM: a request computes when all its KV is there. KV that came by layers would be waited for here."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """See vLLM: blocks leave whole."""

    def wait_for_save(self) -> None:
        """See vLLM: copies hold their blocks, so no wait is needed."""


def _find_problem(vllm_config: Any, groups: list[Any]) -> str | None:
    """What is not supported, in one line; None if all is."""
    try:
        check_config(vllm_config)
    except UserError as error:
        return str(error)
    return find_cache_problem(groups)
