"""Puts an engine together: model, KV pool, loop, runner."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from floodplain.core.backups import BackupTable
from floodplain.core.errors import UserError
from floodplain.engine.config import EngineConfig
from floodplain.engine.device_memory import DeviceMemory
from floodplain.engine.pool_limits import find_limits
from floodplain.engine.runner import ModelRunner
from floodplain.engine.shell import Engine
from floodplain.engine.swap import OpenedSwap, open_swap
from floodplain.leases.client import LeaseClient
from floodplain.lending.client import CoordinatorClient
from floodplain.lending.cuda_lending import open_lent_pool
from floodplain.lending.neighbours import Neighbours, default_device_name, meet_neighbours, open_client
from floodplain.lending.peer_tier import LOOK_S, PeerTier
from floodplain.lending.pool_lender import LenderTimes
from floodplain.lending.pool_limits import PoolLimits
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.swap_space import SwapStats
from floodplain.model.network.config import ModelConfig
from floodplain.model.network.decoder import Decoder
from floodplain.model.network.linear import can_pack
from floodplain.model.network.load import load_decoder
from floodplain.model.sampler import Sampler
from floodplain.model.tokenizer import Tokenizer
from floodplain.model.weights.fingerprint import fingerprint_kv
from floodplain.model.weights.open_model import ModelSource, open_model
from floodplain.policy.base import Policy
from floodplain.policy.lending import LendingPolicy, LendingSettings
from floodplain.policy.registry import make_policy
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopConfig, LoopState

logger = logging.getLogger(__name__)


def kv_bytes_per_token(config: ModelConfig, dtype: str) -> int:
    """Bytes of the keys and values of one token, all layers."""
    return config.shape.kv_bytes_per_token(_torch_dtype(dtype).itemsize)


Meet = Callable[[KVPool, Loop, PoolLimits, OpenedSwap | None], Neighbours | None]


@dataclass(frozen=True, slots=True)
class _Opened:
    """What an engine is put together from; ``on_failure`` gives back what was opened if that does not succeed."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    source: ModelSource
    tokenizer: Tokenizer
    memory: DeviceMemory
    on_failure: ExitStack


def build_engine(config: EngineConfig, policy: Policy | None = None, lending: LendingSettings | None = None) -> Engine:
    """Load the model, map the KV pool, open the swap space, put the parts together, and meet the neighbours.

    Args:
        config: The flags.
        policy: Decides in the place of the one that the flags name.
        lending: When it lends, in the place of what the flags say.

    Raises:
        UserError: The model cannot be read, the device is not there, memory is too small for one request, or the
            coordinator refuses.
    """
    device, dtype = _torch_device(config.device), _torch_dtype(config.dtype)
    client = None if config.coordinator is None else open_client(config.coordinator, config.coordinator_token_file)
    is_named = config.device_name is not None
    name, is_shared = config.device_name or default_device_name(), config.lends or is_named
    source = open_model(config.model, config.seed)
    tokenizer = source.load_tokenizer()
    if is_shared or client is not None:
        config = replace(config, device_name=name)
    settings = lending or LendingSettings().at_calm(config.lend_after)
    meet = partial(_meet, config, client, name, settings, is_last=not is_named)
    with ExitStack() as on_failure:
        memory = DeviceMemory(config, source.config, device, dtype, name if is_shared else None)
        on_failure.callback(memory.close)
        opened = _Opened(config, device, dtype, source, tokenizer, memory, on_failure)
        engine = _assemble(opened, policy or make_policy(config.policy, config.sharing_settings()), meet)
        on_failure.pop_all()
    return engine


def _assemble(opened: _Opened, policy: Policy, meet: Meet) -> Engine:
    config, source, tokenizer, memory = opened.config, opened.source, opened.tokenizer, opened.memory
    block_bytes = memory.layout.block_bytes
    model = _load(config, source, memory, opened.device, opened.dtype)
    limits = find_limits(config, source.config, memory.count_pool_blocks(), block_bytes)
    pool, ledger = memory.open_pool(limits.num_blocks, limits.least_blocks)
    swap = open_swap(config, pool)
    if swap is not None:
        opened.on_failure.callback(swap.space.close)
        if swap.peer is not None:
            opened.on_failure.callback(swap.peer.mover.close)
    eos_token_ids = _reachable(tokenizer.eos_token_ids, source.config.shape.vocab_size)
    loop_config = _loop_config(config, source, eos_token_ids, limits.max_model_len, block_bytes)
    runner = ModelRunner(
        model,
        pool.layers,
        Sampler(eos_token_ids, config.seed),
        block_tokens=config.block_tokens,
        max_model_len=limits.max_model_len,
        on_close=memory.close,
        swap=swap.space if swap else None,
    )
    _warn_of_flags(config, has_swap=swap is not None)
    backups = BackupTable(swap.ledgers if swap else (), retains=ledger.caches_prefixes)
    links = swap.links if swap else ()
    loop = Loop(LoopState(loop_config, ledger, policy, backups, links), policy, config.seed)
    resolved = replace(
        config,
        slice=config.sharing_settings().slice_steps,
        kv_memory=limits.num_blocks * block_bytes,
        max_model_len=limits.max_model_len,
        swap_memory=swap.host_slots * block_bytes if swap else None,
    )
    logger.info("engine config %s", json.dumps(asdict(resolved)))
    return Engine(
        loop,
        runner,
        tokenizer,
        model_name=config.model,
        config=resolved,
        block_bytes=block_bytes,
        vocab_size=source.config.shape.vocab_size,
        swap_stats=swap.space.stats if swap else SwapStats,
        links=swap.facts if swap else (),
        neighbours=meet(pool, loop, limits, swap),
    )


def _meet(
    config: EngineConfig,
    client: CoordinatorClient | None,
    name: str,
    settings: LendingSettings,
    pool: KVPool,
    loop: Loop,
    limits: PoolLimits,
    swap: OpenedSwap | None,
    *,
    is_last: bool,
) -> Neighbours | None:
    if client is None:
        return None
    lent_pool = policy = borrow = None
    if swap is not None and swap.peer is not None:
        parts = swap.peer

        def borrow(client: LeaseClient) -> PeerTier:
            look_s = config.lease_look or LOOK_S
            return PeerTier(client, parts.memory, parts.slots, parts.mover, loop.relocations, look_s)

    if config.lends:
        lent_pool = open_lent_pool(pool, loop, limits)
        policy = LendingPolicy(settings, limits.least_blocks, limits.most_lent_blocks)
    times = LenderTimes() if config.lease_look is None else LenderTimes(look_s=config.lease_look)
    neighbours = meet_neighbours(client, name, lent_pool, policy, times, borrow, is_last=is_last)
    try:
        neighbours.start()
    except BaseException:
        neighbours.close()
        raise
    return neighbours


def _reachable(token_ids: frozenset[int], vocab_size: int) -> frozenset[int]:
    """The tokens that the model has logits for: files name others as well, such as -1 for none."""
    return frozenset(token for token in token_ids if 0 <= token < vocab_size)


def _loop_config(
    config: EngineConfig, source: ModelSource, eos_token_ids: frozenset[int], max_model_len: int, block_bytes: int
) -> LoopConfig:
    return LoopConfig(
        max_model_len=max_model_len,
        max_batched_tokens=config.max_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
        eos_token_ids=eos_token_ids,
        fingerprint=fingerprint_kv(source, config.device, config.dtype, config.block_tokens),
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
