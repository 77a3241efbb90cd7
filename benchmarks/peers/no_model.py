"""An executor of vLLM without a model: each step ends at once, and each request gets the same token every time.

On a virtual clock the model's work is a price, so it need not be done: vLLM's engine, scheduler and block pool, and our
plug-in's scheduler and worker, run as they are. Runs take seconds instead of a minute, with the same times.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

TOKEN = 7
LAYER = "layer.0"


class NoModelExecutor(Executor):
    """The class for ``distributed_executor_backend``. vLLM's base class documents the methods."""

    def _init_executor(self) -> None:
        self._lengths: dict[str, int] = {}
        self._connector: Any = None

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Return one layer with a head of one number."""
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
        return [{LAYER: spec}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """Return the plainest: no kernel reads the cache."""
        return [["LBNHC"]]

    def set_kv_cache_layout(self, layout_name: str, cp_kv_cache_interleave_size: int = 1) -> None:
        """Do nothing; vLLM 0.32 gives the layout alone."""

    def determine_available_memory(self) -> list[int]:
        """Return more than ``num_gpu_blocks_override`` needs."""
        return [2**30]

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Make a connector's worker, if there is a connector, over a cache of real bytes."""
        if self.vllm_config.kv_transfer_config is None:
            return
        config = kv_cache_configs[0]
        block_bytes = config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
        self._connector = KVConnectorFactory.create_connector(self.vllm_config, KVConnectorRole.WORKER, config)
        self._connector.register_kv_caches({LAYER: torch.zeros(config.num_blocks, block_bytes // 4)})

    def compile_or_warm_up_model(self) -> None:
        """Do nothing: there is no model."""

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Make the copies of a step, and a token for each request whose tokens are all computed."""
        copied = None if self._connector is None else self._copy(scheduler_output)
        names = list(scheduler_output.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=self._sample(scheduler_output),
            kv_connector_output=copied,
        )
        if not non_block:
            return output
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(output)
        return future

    def _sample(self, scheduler_output: SchedulerOutput) -> list[list[int]]:
        for name in scheduler_output.finished_req_ids:
            self._lengths.pop(name, None)
        cached = scheduler_output.scheduled_cached_reqs
        num_computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduler_output.scheduled_new_reqs:
            num_computed[new.req_id] = new.num_computed_tokens
            self._lengths[new.req_id] = len(new.prompt_token_ids)
        sampled = []
        for name, num_new in scheduler_output.num_scheduled_tokens.items():
            is_whole = num_computed[name] + num_new >= self._lengths[name]
            self._lengths[name] += is_whole
            sampled.append([TOKEN] * is_whole)
        return sampled

    def _copy(self, scheduler_output: SchedulerOutput) -> KVConnectorOutput:
        connector, metadata = self._connector, scheduler_output.kv_connector_metadata
        connector.handle_preemptions(metadata)
        results = connector.get_transfer_results(scheduler_output.finished_req_ids)
        return KVConnectorOutput(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Refuse: what the engine needs is above.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(f"an executor without a model has no {method}")

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """Return that text is generated."""
        return ("generate",)

    def get_kv_connector_handshake_metadata(self) -> list[Any]:
        """Return none: there is one worker, in this process."""
        return []

    def reset_mm_cache(self) -> None:
        """Do nothing: there are no images."""

    def check_health(self) -> None:
        """Return: there is no worker that could fail."""

    def shutdown(self) -> None:
        """Close the connector's worker."""
        if self._connector is not None:
            self._connector.shutdown()
