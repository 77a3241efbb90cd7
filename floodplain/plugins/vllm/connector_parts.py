"""vLLM's KV connector: connects our scheduler side (``swap_controller``) with our worker side (``worker``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from floodplain.core.errors import UserError
from floodplain.core.sizes import show_size
from floodplain.plugins.vllm.cache_blocks import CacheBlocks
from floodplain.plugins.vllm.compat_names import count_block_bytes, find_groups
from floodplain.plugins.vllm.connector import check_config
from floodplain.plugins.vllm.messages import StepOrders, WorkerReport
from floodplain.plugins.vllm.metrics import FloodplainMetrics, FloodplainStats
from floodplain.plugins.vllm.refusal import refusals_in_one_line
from floodplain.plugins.vllm.register import CONNECTOR
from floodplain.plugins.vllm.settings import read_settings
from floodplain.plugins.vllm.swap_controller import SwapController
from floodplain.plugins.vllm.worker import SwapWorker, find_worker, introduce

if TYPE_CHECKING:
    import torch

    from floodplain.lending.peer_tier import PeerParts


class Orders(KVConnectorMetadata):
    """Carries ``StepOrders``."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


class WorkerMessage(KVConnectorWorkerMetadata):
    """Carries a ``WorkerReport``."""

    def __init__(self, report: WorkerReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMessage:
        """Return the reports of several workers in one step as one."""
        assert isinstance(other, WorkerMessage)
        return WorkerMessage(self.report.merge(other.report))


class FloodplainConnector(KVConnectorBase_V1, SupportsHMA):
    """The class for ``--kv-transfer-config``. vLLM's base class documents the methods."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._engine_id = str(transfer.engine_id)
        self._controller: SwapController | None = None
        self._worker: SwapWorker | None = None
        problem = _find_problem(vllm_config, kv_cache_config)
        self._is_refused = problem is not None
        if problem is not None and role is KVConnectorRole.WORKER:
            return  # the scheduler's side is made next, and reports it once
        with refusals_in_one_line():
            if problem is not None:
                raise UserError(problem)
            self._settings = read_settings(transfer.kv_connector_extra_config)
            groups = find_groups(kv_cache_config)
            self._num_blocks = int(kv_cache_config.num_blocks)
            block_bytes = count_block_bytes(kv_cache_config)
            self._num_slots = self._settings.swap_bytes // block_bytes
            if role is KVConnectorRole.SCHEDULER:
                num_workers = vllm_config.parallel_config.tensor_parallel_size
                peer = None if self._settings.coordinator is None else self._find_peer()
                self._controller = SwapController(self._settings, block_bytes, groups, num_workers, peer)

    def _find_peer(self) -> PeerParts:
        worker = find_worker(self._engine_id)
        if worker is None or worker.peer is None:
            raise UserError("floodplain finds no worker of vLLM in the scheduler's process: leave coordinator out")
        return worker.peer

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a lost copy is computed again."""
        return False

    # -- metrics ---------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> FloodplainStats:
        """Return the counts of this side."""
        return FloodplainStats(data=(self._controller or self._require_worker()).tally.take())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FloodplainStats:
        """Return statistics of ``data``."""
        return FloodplainStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> FloodplainMetrics:
        """Return our Prometheus metrics."""
        return FloodplainMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- in the scheduler ------------------------------------------------------------------------------------------

    @property
    def controller(self) -> SwapController:
        """Return the controller of the scheduler's process."""
        assert self._controller is not None, "asked in a worker"
        return self._controller

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Bind the books to vLLM's pool, and start borrowing; everything is there now."""
        self.controller.books.bind(gpu_block_pool)
        worker, borrowing = find_worker(self._engine_id), self.controller.borrowing
        if worker is not None and borrowing is not None:
            worker.before_close = borrowing.retire
            with refusals_in_one_line():
                borrowing.start()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return that blocks can be freed at once; copies that read some hold those."""
        return False, None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the restorable tokens, without the last one, which is computed again for its successor."""
        one = self.controller.roster[request.request_id]
        one.note_local(num_computed_tokens)
        num_more = self.controller.books.count_restorable(one, request.num_tokens - 1) - num_computed_tokens
        return (num_more, True) if num_more > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Start to restore a request into the blocks that it got."""
        if num_external_tokens:
            one = self.controller.roster[request.request_id]
            num_tokens = one.num_local_tokens + num_external_tokens
            one.note_restored(num_tokens)
            self.controller.books.fetch(one, blocks.blocks, one.num_local_tokens, num_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the orders for the next step."""
        return Orders(self.controller.take_orders(is_idle=not scheduler_output.total_num_scheduled_tokens))

    def update_connector_output(self, connector_output: Any) -> None:
        """Apply the workers' report."""
        message = connector_output.kv_connector_worker_meta
        if message is not None:
            self.controller.note_report(message.report)

    def has_pending_block_frees(self) -> bool:
        """Whether only copies hold some blocks; if so, vLLM waits for one instead of preempting one more request."""
        return self.controller.books.num_draining_blocks > 0

    def has_pending_push_work(self) -> bool:
        """Whether copies are under way; if so, steps go on until they have ended."""
        return len(self.controller.books.transfers) > 0

    def reset_cache(self) -> bool | None:
        """Drop all backups: KV that was computed with other weights is invalid."""
        self.controller.forget_all()
        return True

    # -- in a worker -----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open swap space for vLLM's KV caches."""
        if self._is_refused:
            return  # the scheduler's side reports it next
        settings = self._settings
        default_bytes = settings.swap_bytes if settings.peer_bytes is None else settings.peer_bytes
        with refusals_in_one_line():
            blocks = CacheBlocks(kv_caches, self._num_blocks)
            self._worker = SwapWorker(blocks, self._num_slots, default_bytes if settings.coordinator else 0)
        introduce(self._engine_id, self._worker)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """True (from vLLM 0.33 on): the KV cache may be unmapped, and mapped again at the same addresses."""
        return True

    def unregister_kv_caches(self) -> None:
        """Finish all copies, so that none touches the KV cache until the next step (from vLLM 0.33 on)."""
        if self._worker is not None:
            self._worker.drain()

    def restore_kv_caches(self) -> None:
        """Do nothing (from vLLM 0.33 on): the addresses are the same as before."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Begin the copies of a step; called before it computes, so that they run beside it."""
        assert isinstance(kv_connector_metadata, Orders)
        self._require_worker().begin(kv_connector_metadata.orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return inbound copies that ended, and those that failed; called after each step."""
        arrived, failed = self._require_worker().finish()
        return KVConnectorTransferResults(finished_recving=arrived, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return this worker's report."""
        return WorkerMessage(self._require_worker().take_report())

    def _require_worker(self) -> SwapWorker:
        assert self._worker is not None, "asked before vLLM's caches were there, or in the scheduler"
        return self._worker

    def shutdown(self) -> None:
        """Close the worker and the membership of this process."""
        if self._worker is not None:
            self._worker.close()
        if self._controller is not None and self._controller.borrowing is not None:
            self._controller.borrowing.close()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: copies have begun already."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request computes only once all of its KV is there, not layer by layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are copied whole."""

    def wait_for_save(self) -> None:
        """Do nothing: copies hold their blocks, so no wait is needed."""


def find_own(connector: Any) -> FloodplainConnector | None:
    """Return our connector: this one, or one of those that vLLM's MultiConnector has."""
    found = [one for one in getattr(connector, "sub_connectors", [connector]) if isinstance(one, FloodplainConnector)]
    return found[0] if found else None


def _find_problem(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Return one line that says what is not supported; None if all is."""
    try:
        check_config(vllm_config)
        find_groups(kv_cache_config)
        block_bytes = count_block_bytes(kv_cache_config)
        if read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config).swap_bytes < block_bytes:
            least = show_size(block_bytes)
            raise UserError(f"swap_memory is less than one KV block of {least}: raise it, or leave {CONNECTOR} out")
    except UserError as error:
        return str(error)
    return None
