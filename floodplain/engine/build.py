"""Builds an engine: model, KV pool, swap space, loop, runner, neighbours."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from floodplain.core.backups import BackupTable
from floodplain.core.blocks import BlockLedger
from floodplain.engine.borrowing import Borrowers, open_borrowers
from floodplain.engine.config import EngineConfig
from floodplain.engine.device_memory import DeviceMemory
from floodplain.engine.expansion import open_expansion, open_layer_slots
from floodplain.engine.expansion_plan import plan_expansion
from floodplain.engine.idle_memory import IdleMemory
from floodplain.engine.model_load import load_model, reachable, torch_dtype
from floodplain.engine.pool_limits import find_limits
from floodplain.engine.runner import ModelRunner
from floodplain.engine.shell import Engine
from floodplain.engine.stage_build import StageParts
from floodplain.engine.steady_state import SteadyState, read_steady_state
from floodplain.engine.swap import OpenedSwap, open_swap
from floodplain.leases.client import LeaseClient
from floodplain.lending.agent import LeaseAgent
from floodplain.lending.client import CoordinatorClient
from floodplain.lending.lent_pool import LentPool, open_lent_pool
from floodplain.lending.neighbours import Neighbours, default_device_name, open_client
from floodplain.lending.pool_lender import LenderTimes, PoolLender
from floodplain.lending.pool_limits import PoolLimits
from floodplain.memory.backend import Backend
from floodplain.memory.backend_choice import choose_backend
from floodplain.memory.host_memory import available_bytes
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.layer_slots import LayerSlots
from floodplain.memory.swap_slots import SwapSlots
from floodplain.model.network.config import ModelConfig
from floodplain.model.network.decoder import Decoder
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
    return config.shape.kv_bytes_per_token(torch_dtype(dtype).itemsize)


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """An engine and its parts, which ``Engine.close`` closes.

    Attributes:
        engine: The engine.
        parts: Parts of a pipeline stage with all layers.
        memory: The memory of parameters and KV.
        pool: The KV pool.
        slots: Slots of swap space in host memory; None if there is none.
    """

    engine: Engine
    parts: StageParts
    memory: DeviceMemory
    pool: KVPool
    slots: SwapSlots | None


def build_engine(config: EngineConfig, policy: Policy | None = None, lending: LendingSettings | None = None) -> Engine:
    """Build an engine as ``open_engine`` does, and return it without its parts."""
    return open_engine(config, policy, lending).engine


def open_engine(
    config: EngineConfig, policy: Policy | None = None, lending: LendingSettings | None = None
) -> OpenedEngine:
    """Load the model, map the KV pool, open the swap space, build the engine, and join the coordinator if any.

    Args:
        config: The flags.
        policy: Replaces the policy that the flags name.
        lending: Replaces the lending settings of the flags.

    Raises:
        UserError: The model cannot be read, the device does not exist, memory is too small for one request, or the
            coordinator refuses.
    """
    backend, dtype = choose_backend(torch.device(config.device)), torch_dtype(config.dtype)
    client = None if config.coordinator is None else open_client(config.coordinator, config.coordinator_token_file)
    name, steady = config.device_name or default_device_name(), read_steady_state(config.profile)
    source = open_model(config.model, config.seed)
    tokenizer = source.load_tokenizer()
    eos_token_ids = reachable(tokenizer.eos_token_ids, source.config.shape.vocab_size)
    with ExitStack() as on_failure:
        memory = DeviceMemory(config, source.config, backend, dtype, name if _is_shared(config) else None)
        on_failure.callback(memory.close)
        policy = policy or make_policy(config.policy, config.sharing_settings())
        model = load_model(config, source, memory, backend.torch_device, dtype)
        num_blocks = memory.count_pool_blocks()
        plan = plan_expansion(config, memory.layout, num_blocks, memory.quantum_blocks, available_bytes())
        limits = find_limits(config, source.config, plan.sure_blocks, memory.layout.block_bytes, steady)
        pool, ledger = memory.open_pool(num_blocks, min(num_blocks, limits.least_blocks), plan.most_blocks)
        swap = open_swap(config, pool, backend)
        on_failure.callback(swap.close)
        slots = open_layer_slots(config, plan, pool, ledger, backend)
        on_failure.callback(lambda: slots.close() if slots is not None else None)
        runner = _make_runner(config, model, pool, Sampler(eos_token_ids, config.seed), swap, limits, memory, slots)
        loop_config = _loop_config(config, source, eos_token_ids, limits, memory.layout.block_bytes)
        loop = _make_loop(config, loop_config, ledger, policy, swap)
        expansion = None if slots is None else open_expansion(config, plan, memory.layout, slots, loop)
        resolved = _resolve(config, name, limits, num_blocks, swap, memory.layout.block_bytes)
        lent_pool = open_lent_pool(pool, loop, limits, backend) if config.lends else None
        borrow = partial(open_borrowers, config, backend, loop, swap.peer, expansion)
        neighbours = _make_neighbours(config, client, name, lent_pool, limits, lending, steady, borrow)
        on_failure.callback(lambda: neighbours.close() if neighbours is not None else None)
        engine = Engine(
            loop,
            runner,
            tokenizer,
            model_name=config.model,
            config=resolved,
            block_bytes=memory.layout.block_bytes,
            vocab_size=source.config.shape.vocab_size,
            swap_stats=swap.space.stats,
            links=swap.facts,
            neighbours=neighbours,
            expansion=expansion,
            idle_memory=_make_idle_memory(config, backend, pool, loop.state, swap.slots),
        )
        if neighbours is not None:
            neighbours.start()
        on_failure.pop_all()
    return OpenedEngine(engine, _make_parts(resolved, source, model, tokenizer, loop_config), memory, pool, swap.slots)


def _is_shared(config: EngineConfig) -> bool:
    """Whether the device has a name under which neighbours can find it."""
    return config.lends or config.device_name is not None


def _make_parts(
    config: EngineConfig, source: ModelSource, model: Decoder, tokenizer: Tokenizer, loop_config: LoopConfig
) -> StageParts:
    return StageParts(
        config=config,
        shape=source.config.shape,
        model=model,
        tokenizer=tokenizer,
        eos_token_ids=loop_config.eos_token_ids,
        fingerprint=loop_config.fingerprint,
        block_bytes=loop_config.block_bytes,
    )


def _make_runner(
    config: EngineConfig,
    model: Decoder,
    pool: KVPool,
    sampler: Sampler,
    swap: OpenedSwap,
    limits: PoolLimits,
    memory: DeviceMemory,
    slots: LayerSlots | None,
) -> ModelRunner:
    return ModelRunner(
        model,
        pool.layers,
        sampler,
        swap.space,
        block_tokens=config.block_tokens,
        max_model_len=limits.max_model_len,
        on_close=memory.close,
        layer_slots=slots,
    )


def _make_loop(
    config: EngineConfig, loop_config: LoopConfig, ledger: BlockLedger, policy: Policy, swap: OpenedSwap
) -> Loop:
    backups = BackupTable(swap.ledgers, retains=ledger.caches_prefixes)
    return Loop(LoopState(loop_config, ledger, policy, backups, swap.links), policy, config.seed)


def _make_idle_memory(
    config: EngineConfig, backend: Backend, pool: KVPool, state: LoopState, slots: SwapSlots | None
) -> IdleMemory | None:
    """The returner of idle memory; None for a GPU, or if ``--return-after`` is 0."""
    if not backend.shares_host_memory or not config.return_after:
        return None
    return IdleMemory(pool, state.ledger, slots, state.backups, config.return_after)


def _loop_config(
    config: EngineConfig, source: ModelSource, eos_token_ids: frozenset[int], limits: PoolLimits, block_bytes: int
) -> LoopConfig:
    return LoopConfig(
        max_model_len=limits.max_model_len,
        max_batched_tokens=config.max_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
        eos_token_ids=eos_token_ids,
        fingerprint=fingerprint_kv(source, config.device, config.dtype, config.block_tokens),
        block_bytes=block_bytes,
    )


def _resolve(
    config: EngineConfig, name: str, limits: PoolLimits, num_blocks: int, swap: OpenedSwap, block_bytes: int
) -> EngineConfig:
    """The configuration with values that depend on the model, the pool and the machine; it is logged."""
    resolved = replace(
        config,
        slice=config.sharing_settings().slice_steps,
        kv_memory=num_blocks * block_bytes,
        max_model_len=limits.max_model_len,
        swap_memory=None if swap.host_slots is None else swap.host_slots * block_bytes,
        device_name=config.device_name if config.coordinator is None else name,
    )
    _log_config(config, resolved)
    return resolved


def _log_config(config: EngineConfig, resolved: EngineConfig) -> None:
    for flag in config.unused_flags():
        logger.warning("%s changes nothing under --policy %s", flag, config.policy)
    if config.swap == "none" and config.policy != "fcfs":
        what = "chooses who begins" if make_policy(config.policy).chooses_admissions else "serves by arrival"
        logger.warning("--policy %s takes turns in swap space: with --swap none it %s", config.policy, what)
    logger.info("engine config %s", json.dumps(asdict(resolved)))


def _make_neighbours(
    config: EngineConfig,
    client: CoordinatorClient | None,
    name: str,
    lent_pool: LentPool | None,
    limits: PoolLimits,
    lending: LendingSettings | None,
    steady: SteadyState | None,
    borrow: Callable[[LeaseClient], Borrowers],
) -> Neighbours | None:
    """Make the neighbours, not yet started; None without a coordinator."""
    if client is None:
        return None
    device = None if lent_pool is None else lent_pool.as_device(config.recall_deadline)
    agent = LeaseAgent(client, name, device, is_last=config.device_name is None)
    lender = None
    if lent_pool is not None:
        settings = lending or LendingSettings().at_calm(config.lend_after)
        if steady is not None:
            settings = steady.refine(settings, lent_pool.block_bytes)
        policy = LendingPolicy(settings, limits.least_blocks, limits.most_lent_blocks)
        times = LenderTimes() if config.lease_look is None else LenderTimes(look_s=config.lease_look)
        lender = PoolLender(lent_pool, policy, agent.membership, lambda: agent.can_offer, times, lent_pool.guest_bytes)
    borrowers = borrow(agent.membership)
    return Neighbours(agent, lent_pool, lender, borrowers.peer_tier, borrowers.near_layers)
