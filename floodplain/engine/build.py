"""Puts an engine together: model, KV pool, loop, runner."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from dataclasses import asdict, replace

import torch

from floodplain.core.backups import BackupTable
from floodplain.core.errors import UserError
from floodplain.engine.config import EngineConfig
from floodplain.engine.device_memory import DeviceMemory
from floodplain.engine.models.config import ModelConfig
from floodplain.engine.models.decoder import Decoder
from floodplain.engine.models.linear import can_pack
from floodplain.engine.models.load import load_decoder
from floodplain.engine.pool_limits import find_max_model_len
from floodplain.engine.runner import ModelRunner
from floodplain.engine.sampler import Sampler
from floodplain.engine.shell import Engine
from floodplain.engine.swap import open_swap
from floodplain.engine.tokenizer import Tokenizer
from floodplain.engine.weights.open_model import ModelSource, open_model
from floodplain.memory.swap_space import SwapStats
from floodplain.policy.base import Policy
from floodplain.policy.registry import make_policy
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopConfig, LoopState

logger = logging.getLogger(__name__)


def kv_bytes_per_token(config: ModelConfig, dtype: str) -> int:
    """Bytes of the keys and values of one token, all layers."""
    return config.shape.kv_bytes_per_token(_torch_dtype(dtype).itemsize)


def build_engine(config: EngineConfig, policy: Policy | None = None) -> Engine:
    """Load the model, map the KV pool, open the swap space, and put the parts together.

    ``policy`` decides in the place of the one that the flags name.

    Raises:
        UserError: The model cannot be read, the device is not there, or memory is too small for one request.
    """
    device, dtype = _torch_device(config.device), _torch_dtype(config.dtype)
    source = open_model(config.model, config.seed)
    tokenizer = source.load_tokenizer()
    with ExitStack() as on_failure:
        memory = DeviceMemory(config, source.config, device, dtype)
        on_failure.callback(memory.close)
        policy = policy or make_policy(config.policy, config.sharing_settings())
        engine = _assemble(config, policy, source, tokenizer, memory, device, dtype, on_failure)
        on_failure.pop_all()
    return engine


def _assemble(
    config: EngineConfig,
    policy: Policy,
    source: ModelSource,
    tokenizer: Tokenizer,
    memory: DeviceMemory,
    device: torch.device,
    dtype: torch.dtype,
    on_failure: ExitStack,
) -> Engine:
    model = _load(config, source, memory, device, dtype)
    pool, ledger = memory.open_pool()
    max_model_len = find_max_model_len(config, source.config, pool.num_blocks)
    swap = open_swap(config, pool)
    if swap is not None:
        on_failure.callback(swap.space.close)
    loop_config = _loop_config(config, source, tokenizer, max_model_len, memory.layout.block_bytes)
    runner = ModelRunner(
        model,
        pool.layers,
        Sampler(tokenizer.eos_token_ids, config.seed),
        block_tokens=config.block_tokens,
        max_model_len=max_model_len,
        on_close=memory.close,
        swap=swap.space if swap else None,
    )
    _warn_of_flags(config, has_swap=swap is not None)
    backups = BackupTable(swap.ledgers if swap else (), retains=ledger.caches_prefixes)
    state = LoopState(loop_config, ledger, policy, backups, swap.links if swap else ())
    resolved = replace(
        config,
        slice=config.sharing_settings().slice_steps,
        kv_memory=pool.num_blocks * memory.layout.block_bytes,
        max_model_len=max_model_len,
        swap_memory=swap.host_slots * memory.layout.block_bytes if swap else None,
    )
    logger.info("engine config %s", json.dumps(asdict(resolved)))
    return Engine(
        Loop(state, policy, config.seed),
        runner,
        tokenizer,
        model_name=config.model,
        config=resolved,
        block_bytes=memory.layout.block_bytes,
        vocab_size=source.config.shape.vocab_size,
        swap_stats=swap.space.stats if swap else SwapStats,
        links=swap.facts if swap else (),
    )


def _loop_config(
    config: EngineConfig, source: ModelSource, tokenizer: Tokenizer, max_model_len: int, block_bytes: int
) -> LoopConfig:
    return LoopConfig(
        max_model_len=max_model_len,
        max_batched_tokens=config.max_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
        eos_token_ids=tokenizer.eos_token_ids,
        fingerprint=f"{source.name}:{config.dtype}:{config.block_tokens}",
        block_bytes=block_bytes,
    )


def _warn_of_flags(config: EngineConfig, *, has_swap: bool) -> None:
    for flag in config.unused_flags():
        logger.warning("%s changes nothing under --policy %s", flag, config.policy)
    if not has_swap and config.policy != "fcfs":
        logger.warning("--policy %s takes turns in swap space: with --swap none it serves by arrival", config.policy)


def _load(
    config: EngineConfig, source: ModelSource, memory: DeviceMemory, device: torch.device, dtype: torch.dtype
) -> Decoder:
    is_packed = config.pack_weights and can_pack(dtype, device)
    return load_decoder(
        source.config,
        source,
        dtype=dtype,
        device=device,
        block_tokens=config.block_tokens,
        allocate=None if is_packed else memory.allocate_parameters,
        is_packed=is_packed,
    )


def _torch_dtype(name: str) -> torch.dtype:
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return dtypes[name]


def _torch_device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise UserError(f"--device {name} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
