"""Refuses by name the features of vLLM that the plug-in does not support. Imports nothing of vLLM.

What would be wrong, or might be and was never tried, is refused. docs/how-to/vllm.md has the list.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from floodplain.core.errors import UserError
from floodplain.plugins.vllm.register import CONNECTOR, CONNECTOR_MODULE, MULTI, NATIVE, SCHEDULER
from floodplain.plugins.vllm.settings import list_connectors

CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Types of vLLM's KV cache whose blocks hold all of their data."""

NO_SWAP = (
    "the policy decides, and there is no swap space: a request that is sent away is computed again. To have some, pass"
    f' --kv-transfer-config \'{{"kv_connector": "{CONNECTOR}", "kv_connector_module_path": "{CONNECTOR_MODULE}",'
    ' "kv_role": "kv_both"}\''
)

DRAFTERS = ("ngram", "draft_model", "eagle", "eagle3", "mtp")
"""Methods of ``--speculative-config`` whose drafts the engine verifies in its next step."""

Check = tuple[Callable[[Any], bool], str]


def _connector(vllm_config: Any) -> str | None:
    return getattr(vllm_config.kv_transfer_config, "kv_connector", None)


def _is_first(vllm_config: Any) -> bool:
    """Whether our connector is the first, or the only one, and no other."""
    names = [one.get("kv_connector") for one in list_connectors(vllm_config)]
    return names[:1] == [CONNECTOR] and CONNECTOR not in names[1:]


def _splits(vllm_config: Any) -> bool:
    """Whether our connector would only save, or only load."""
    transfer = vllm_config.kv_transfer_config
    return {transfer.kv_role, list_connectors(vllm_config)[0].get("kv_role")} != {"kv_both"}


_CHECKS: tuple[Check, ...] = (
    (
        lambda c: c.parallel_config.pipeline_parallel_size > 1,
        "pipeline parallelism is not supported yet: use tensor parallelism",
    ),
    (
        lambda c: c.parallel_config.decode_context_parallel_size > 1,
        "decode context parallelism is not supported: leave --decode-context-parallel-size out",
    ),
    (
        lambda c: c.parallel_config.prefill_context_parallel_size > 1,
        "prefill context parallelism is not supported: leave --prefill-context-parallel-size out",
    ),
    (
        lambda c: c.model_config.is_encoder_decoder,
        "encoder-decoder models are not supported: serve this one without floodplain",
    ),
    (
        lambda c: c.model_config.runner_type == "pooling",
        "pooling models keep no KV to swap: serve this one without floodplain",
    ),
    (
        lambda c: c.model_config.is_diffusion,
        "diffusion models are not supported: serve this one without floodplain",
    ),
    (
        lambda c: c.model_config.is_attention_free,
        "models without attention have no KV to swap: serve this one without floodplain",
    ),
    (
        lambda c: c.scheduler_config.disable_chunked_mm_input,
        "prompts are computed in chunks: leave --disable-chunked-mm-input out",
    ),
    (
        lambda c: c.ec_transfer_config is not None,
        "the transfer of encoder outputs is not supported: leave --ec-transfer-config out",
    ),
    (
        lambda c: names_connector(c) and c.aux_output_config.enabled,
        "the routed experts of restored tokens would be missing: leave --enable-return-routed-experts out",
    ),
    (
        lambda c: (
            c.cache_config.kv_offloading_size is not None
            and (names_connector(c) or getattr(c.kv_transfer_config, "kv_connector_module_path", None) is not None)
        ),
        "floodplain has swap space of its own (swap_memory): leave --kv-offloading-size out",
    ),
    (
        lambda c: _connector(c) == MULTI and not _is_first(c),
        f"of the connectors of {MULTI}, the first that has a request's KV restores it: name {CONNECTOR} first and once",
    ),
    (
        lambda c: _connector(c) not in (None, CONNECTOR, MULTI, NATIVE),
        f"FloodplainScheduler runs with {CONNECTOR}, alone or in a {MULTI}, with vLLM's {NATIVE} or with none:"
        " name no other kv_connector",
    ),
    (
        lambda c: _is_first(c) and _splits(c),
        "KV is saved and loaded, whether or not prefill and decode are on different instances:"
        ' set "kv_role": "kv_both" in --kv-transfer-config',
    ),
)


def expect_supported(vllm_config: Any, *, borrows: bool, pins: bool, follows_sleep: bool) -> None:
    """Raise UserError, which names what is not supported and what to change, for a configuration of vLLM.

    Args:
        borrows: Whether the plug-in is to borrow memory.
        pins: Whether the plug-in is to keep KV for sessions.
        follows_sleep: Whether this vLLM calls connectors when it unmaps its KV cache.
    """
    for is_wrong, line in _CHECKS:
        if is_wrong(vllm_config):
            raise UserError(line)
    _expect_scheduler(vllm_config.scheduler_config.scheduler_cls)
    _expect_drafter(vllm_config.speculative_config)
    dtype = vllm_config.cache_config.cache_dtype
    if dtype not in CACHE_DTYPES:
        raise UserError(f"--kv-cache-dtype {dtype} is not supported: use one of {', '.join(CACHE_DTYPES)}")
    if vllm_config.model_config.enable_sleep_mode and not follows_sleep:
        raise UserError("sleep mode is supported from vLLM 0.33 on: leave --enable-sleep-mode out")
    if borrows:
        _expect_one_process(vllm_config.parallel_config)
    if pins and vllm_config.speculative_config is not None:
        raise UserError("KV is not kept for sessions beside drafts: leave pin_sessions out, or --speculative-config")


def names_connector(vllm_config: Any) -> bool:
    """Whether a configuration of vLLM names our connector, alone or beside others."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and CONNECTOR in f"{transfer.kv_connector} {transfer.kv_connector_extra_config}"


def names_scheduler(vllm_config: Any) -> bool:
    """Whether a configuration of vLLM names our scheduler, or a subclass of it."""
    return _is_ours(vllm_config.scheduler_config.scheduler_cls)


def _is_ours(scheduler: str | type | None) -> bool:
    names = [f"{cls.__module__}.{cls.__qualname__}" for cls in getattr(scheduler, "__mro__", ())]
    return scheduler == SCHEDULER or SCHEDULER in names


def _expect_scheduler(scheduler: str | type | None) -> None:
    if isinstance(scheduler, str) and scheduler != SCHEDULER:
        module, _, name = scheduler.rpartition(".")
        try:
            scheduler = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(f"--scheduler-cls {scheduler} is not found: {error}") from None
    if not _is_ours(scheduler):
        raise UserError(f"{CONNECTOR} does nothing without its scheduler: pass --scheduler-cls {SCHEDULER}")


def _expect_drafter(speculative_config: Any) -> None:
    if speculative_config is not None and speculative_config.method not in DRAFTERS:
        raise UserError(
            f"speculative decoding with {speculative_config.method} is not supported: use one of {', '.join(DRAFTERS)}"
        )


def _expect_one_process(parallel_config: Any) -> None:
    if parallel_config.tensor_parallel_size > 1:
        raise UserError("memory is borrowed for one worker: leave coordinator out, or --tensor-parallel-size")
    if parallel_config.distributed_executor_backend != "uni":
        raise UserError(
            "memory is borrowed where vLLM's worker runs in its scheduler's process:"
            " leave coordinator out, or pass --distributed-executor-backend uni (not on CPUs)"
        )
