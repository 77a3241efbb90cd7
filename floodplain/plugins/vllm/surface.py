"""Every name of vLLM that the plug-in relies on, and a check that the installed vLLM still has it.

vLLM calls its scheduler and its KV cache manager private. So a version that no test has run is not refused by its
number, but by what it lacks.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from inspect import Parameter
from typing import Any

_ASSIGNED = re.compile(r"\bself\.(\w+)\s*(?::[^=\n]+)?=[^=]")
_FREE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Used:
    """A class or function of vLLM, and what is used of it.

    Attributes:
        called: Methods that are called: their leading parameters.
        overridden: Methods that a subclass replaces: all their parameters.
        forwarded: Methods that a subclass replaces, and that get all further arguments as they came: the leading ones.
        attributes: Of an object; those that some versions lack are not among them.
    """

    place: str
    name: str
    called: Mapping[str, str] = field(default_factory=dict)
    overridden: Mapping[str, str] = field(default_factory=dict)
    forwarded: Mapping[str, str] = field(default_factory=dict)
    attributes: str = ""


SURFACE = (
    Used(
        "vllm.v1.core.sched.scheduler", "Scheduler",
        called={
            "_free_blocks": "request", "_free_request_blocks": "request",
            "_enqueue_waiting_request": "request", "_set_kv_fetch_stage": "request stage",
        },
        overridden={
            "_free_request": "request delay_free_blocks", "_handle_blocked_waiting_request": "request",
            "_handle_stopped_request": "request", "_inflight_prefill_reserved_blocks": "",
            "_preempt_request": "request timestamp drop_stale_output",
            "_reserve_prefill_lookahead": "request num_computed_tokens num_new_tokens",
            "_update_after_schedule": "scheduler_output", "add_request": "request",
            "_update_request_as_session": "session update", "get_num_unfinished_requests": "",
            "reset_prefix_cache": "reset_running_requests reset_connector", "schedule": "throttle_prefills",
            "update_from_output": "scheduler_output model_runner_output",
        },
        forwarded={
            "_try_schedule_encoder_inputs": "request num_computed_tokens num_new_tokens",
            "_update_request_with_output": "request",
        },
        attributes="_inflight_prefills block_size cache_config connector deferred_frees deferred_waiting"
        " failed_recving_kv_req_ids finished_recving_kv_req_ids hash_block_size kv_cache_config kv_cache_manager"
        " kv_holding_waiting lora_config"
        " max_model_len max_num_active_reqs max_num_scheduled_tokens num_lookahead_tokens num_prefill_lookahead"
        " num_spec_tokens num_waiting_for_streaming_input pause_state"
        " recompute_kv_load_failures requests running scheduler_config vllm_config waiting _spec_decode_step_blocks",
    ),
    Used("vllm.v1.core.sched.async_scheduler", "AsyncScheduler", called={"_update_after_schedule": "scheduler_output"}),
    Used("vllm.platforms.interface", "Platform", called={"is_cpu": ""}),
    Used("vllm.v1.core.sched.interface", "PauseState", attributes="PAUSED_NEW UNPAUSED"),
    Used(
        "vllm.v1.core.sched.output", "SchedulerOutput",
        attributes="num_scheduled_tokens scheduled_new_reqs scheduled_spec_decode_tokens total_num_scheduled_tokens",
    ),
    Used("vllm.v1.core.sched.output", "NewRequestData", attributes="num_computed_tokens req_id"),
    Used(
        "vllm.v1.core.sched.request_queue", "RequestQueue",
        overridden={
            "add_request": "request", "peek_request": "", "pop_request": "", "prepend_request": "request",
            "prepend_requests": "requests", "remove_request": "request", "remove_requests": "requests",
        },
    ),
    Used("vllm.v1.outputs", "ModelRunnerOutput", attributes="kv_connector_output"),
    Used("vllm.v1.outputs", "KVConnectorOutput", attributes="failed_recving finished_recving kv_connector_worker_meta"),
    Used(
        "vllm.v1.request", "Request",
        attributes="arrival_time block_hashes cache_salt drop_stale_output lora_request max_tokens num_computed_tokens"
        " num_output_placeholders num_output_tokens num_preemptions num_prompt_tokens num_stale_output_tokens"
        " num_tokens priority request_id resumable sampling_params session_id skip_reading_prefix_cache spec_token_ids"
        " status",
        called={"is_finished": ""},
    ),
    Used(
        "vllm.v1.request", "RequestStatus",
        attributes="FINISHED_ABORTED FINISHED_ERROR PREEMPTED WAITING WAITING_FOR_REMOTE_KVS WAITING_FOR_STREAMING_REQ",
    ),
    Used(
        "vllm.v1.core.kv_cache_manager", "KVCacheManager",
        attributes="block_pool coordinator", called={"prefix_cache_lookup_enabled": "request"},
    ),
    Used("vllm.v1.core.kv_cache_coordinator", "KVCacheCoordinator", attributes="single_type_managers"),
    Used("vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager",
        attributes="block_size cache_hit_alignment_tokens req_to_blocks"),
    Used(
        "vllm.v1.core.block_pool", "BlockPool",
        overridden={
            "_remove_cached_block_hashes": "block", "free_blocks": "ordered_blocks", "reset_prefix_cache": "",
            "touch": "blocks",
        },
        called={"get_cached_block": "block_hash kv_cache_group_ids", "get_num_free_blocks": ""},
        forwarded={"_insert_block_hash": "block_hash_with_group_id", "unpin_blocks": "blocks"},
        attributes="num_gpu_blocks",
    ),
    Used(
        "vllm.config.speculative", "SpeculativeConfig",
        attributes="max_num_new_slots_for_drafting method",
    ),
    Used("vllm.v1.core.kv_cache_utils", "get_block_hash"),
    Used("vllm.v1.core.kv_cache_utils", "KVCacheBlock", attributes="block_id is_null ref_cnt"),
    Used("vllm.v1.kv_cache_interface", "KVCacheConfig", attributes="kv_cache_groups num_blocks"),
    Used("vllm.v1.kv_cache_interface", "KVCacheGroupSpec", attributes="kv_cache_spec layer_names"),
    Used("vllm.v1.kv_cache_interface", "KVCacheSpec", attributes="block_size page_size_bytes"),
    Used(
        "vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1",
        overridden={
            "bind_gpu_block_pool": "gpu_block_pool", "build_connector_meta": "scheduler_output",
            "build_connector_worker_meta": "", "get_kv_connector_stats": "",
            "get_num_new_matched_tokens": "request num_computed_tokens",
            "get_transfer_results": "finished_req_ids", "handle_preemptions": "kv_connector_metadata",
            "has_pending_block_frees": "", "has_pending_push_work": "", "register_kv_caches": "kv_caches",
            "request_finished": "request block_ids", "reset_cache": "", "save_kv_layer":
            "layer_name kv_layer attn_metadata", "shutdown": "", "start_load_kv": "forward_context",
            "update_connector_output": "connector_output",
            "update_state_after_alloc": "request blocks num_external_tokens", "wait_for_layer_load": "layer_name",
            "wait_for_save": "",
        },
        attributes="requires_kv_delivery",
    ),
    Used(
        "vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorTransferResults",
        attributes="failed_recving finished_recving",
    ),
    Used("vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorMetadata"),
    Used(
        "vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorWorkerMetadata",
        overridden={"aggregate": "other"},
    ),
    Used(
        "vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory",
        called={"register_connector": "name module_path class_name"},
    ),
    Used(
        "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector", "MultiConnector", attributes="sub_connectors"
    ),
    Used("vllm.distributed.kv_transfer.kv_connector.v1.metrics", "KVConnectorStats"),
    Used("vllm.distributed.kv_transfer.kv_connector.v1.metrics", "KVConnectorPromMetrics"),
    Used(
        "vllm.config", "VllmConfig",
        attributes="additional_config aux_output_config cache_config ec_transfer_config kv_transfer_config lora_config"
        " model_config parallel_config scheduler_config speculative_config",
    ),
)  # fmt: skip
"""Without what only some of the accepted versions have; ``compat_names`` asks for that by name."""


def find_changes(surface: Iterable[Used] = SURFACE) -> list[str]:
    """Return what the installed vLLM lacks of the surface, a few words for each; empty if it has all of it."""
    return [change for used in surface for change in _find_changes_of(used)]


def _find_changes_of(used: Used) -> list[str]:
    try:
        thing = getattr(import_module(used.place), used.name)
    except (ImportError, AttributeError):
        return [f"{used.place}.{used.name} is gone"]
    names = used.attributes.split()
    has = _attributes_of(thing) if names else frozenset()
    gone = [f"{used.name}.{name} is gone" for name in names if name not in has]
    rules = (used.called, _fits_a_call), (used.overridden, _fits_an_override), (used.forwarded, _fits_a_wrapper)
    for methods, fits in rules:
        gone += [_compare(used.name, thing, name, wanted.split(), fits) for name, wanted in methods.items()]
    return [change for change in gone if change]


def _compare(owner: str, thing: Any, name: str, wanted: list[str], fits: Callable[..., bool]) -> str:
    """Return how a method's parameters differ from the wanted ones; "" if they fit."""
    method = inspect.getattr_static(thing, name, None)
    if method is None:
        return f"{owner}.{name} is gone"
    parameters = list(inspect.signature(getattr(method, "__func__", method)).parameters.values())
    named = [one for one in parameters if one.kind not in _FREE and one.name not in ("self", "cls")]
    names = [one.name for one in named]
    needed = [one.name for one in named if one.default is Parameter.empty]
    return "" if fits(names, needed, wanted) else f"{owner}.{name} takes {tuple(names)}, and took {tuple(wanted)}"


def _fits_a_call(names: list[str], needed: list[str], wanted: list[str]) -> bool:
    return names[: len(wanted)] == wanted and set(needed) <= set(wanted)


def _fits_an_override(names: list[str], needed: list[str], wanted: list[str]) -> bool:
    return names == wanted


def _fits_a_wrapper(names: list[str], needed: list[str], wanted: list[str]) -> bool:
    return names[: len(wanted)] == wanted


def _attributes_of(thing: Any) -> frozenset[str]:
    """Return the names that a class, or its methods by ``self.name = ...``, define; of its base classes, too."""
    names = set(dir(thing))
    for cls in getattr(thing, "__mro__", ()):
        names |= set(getattr(cls, "__annotations__", ())) | set(getattr(cls, "__slots__", ()))
        with suppress(OSError, TypeError):  # it has no source in Python
            names |= set(_ASSIGNED.findall(inspect.getsource(cls)))
    return frozenset(names)
