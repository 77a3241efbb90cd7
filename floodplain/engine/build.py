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
from floodplain.core.sizes import show_size
from floodplain.engine.compute_threads import limit_compute_threads
from floodplain.engine.config import EngineConfig
from floodplain.engine.device_memory import DeviceMemory, load_model, torch_dtype
from floodplain.engine.expansion import Expansion, open_expansion, open_layer_slots, plan_expansion
from floodplain.engine.idle_memory import IdleMemory
from floodplain.engine.pool_limits import SteadyState, find_limits, read_steady_state
from floodplain.engine.runner import ModelRunner
from floodplain.engine.shell import Engine
from floodplain.engine.stage_build import StageParts, make_parts
from floodplain.engine.swap import OpenedSwap, open_swap
from floodplain.lending.agent import LeaseAgent
from floodplain.lending.client import CoordinatorClient
from floodplain.lending.lent_pool import LentPool, PoolLimits, open_lent_pool
from floodplain.lending.membership import Membership
from floodplain.lending.near_layers import NearLayers
from floodplain.lending.neighbours import Neighbours, default_device_name, open_client
from floodplain.lending.peer_tier import PeerParts, PeerTier
from floodplain.lending.pool_lender import LOAD_LOOK_S, PoolLender
from floodplain.lending.requests import LOOK_S, LeaseRequests
from floodplain.memory.backend import Backend
from floodplain.memory.backend_choice import choose_backend
from floodplain.memory.host_memory import available_bytes
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.swap_slots import SwapSlots
from floodplain.model.network.config import ModelConfig
from floodplain.model.weights.open_model import open_model
from floodplain.observe.start_log import StartLog
from floodplain.policy.base import Policy
from floodplain.policy.lending import LendingPolicy, LendingSettings
from floodplain.policy.registry import make_policy
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopState

logger = logging.getLogger(__name__)


def kv_bytes_per_token(config: ModelConfig, dtype: str) -> int:
    """Bytes of the keys and values of one token, all layers."""
    return config.shape.kv_bytes_per_token(torch_dtype(dtype).itemsize)


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """An engine and its parts, which ``Engine.close`` closes; ``slots`` are swap space in host memory, if any."""

    engine: Engine
    parts: StageParts
    memory: DeviceMemory
    pool: KVPool
    slots: SwapSlots | None


def build_engine(
    config: EngineConfig,
    policy: Policy | None = None,
    lending: LendingSettings | None = None,
    start_log: StartLog | None = None,
) -> Engine:
    """Build an engine as ``open_engine`` does, and return it without its parts."""
    return open_engine(config, policy, lending, start_log).engine


def open_engine(
    config: EngineConfig,
    policy: Policy | None = None,
    lending: LendingSettings | None = None,
    start_log: StartLog | None = None,
) -> OpenedEngine:
    """Load the model, map the KV pool, open the swap space, build the engine, and join the coordinator if any.

    ``policy`` and ``lending`` replace what the flags name; ``start_log`` continues an earlier one. Raises UserError.
    """
    start_log = start_log or StartLog()
    limit_compute_threads()
    start_log.begin(f"opening the model {config.model}")
    backend, dtype = choose_backend(torch.device(config.device)), torch_dtype(config.dtype)
    client = None if config.coordinator is None else open_client(config.coordinator, config.coordinator_token_file)
    name, steady = config.device_name or default_device_name(), read_steady_state(config, backend.describe())
    source = open_model(config.model, config.seed)
    tokenizer = source.load_tokenizer()
    with ExitStack() as on_failure:
        is_shared = config.lends or config.device_name is not None  # has a name under which neighbours find it
        memory = DeviceMemory(config, source.config, backend, dtype, name if is_shared else None)
        on_failure.callback(memory.close)
        model = load_model(config, source, memory, backend.torch_device, dtype, start_log=start_log)
        num_blocks = memory.count_pool_blocks()
        start_log.begin(f"mapping a KV pool of {show_size(num_blocks * memory.layout.block_bytes)}")
        plan = plan_expansion(config, memory.layout, num_blocks, memory.quantum_blocks, available_bytes())
        limits = find_limits(config, source.config, plan.sure_blocks, memory.layout.block_bytes, steady)
        pool, ledger = memory.open_pool(num_blocks, min(num_blocks, limits.least_blocks), plan.most_blocks)
        start_log.begin(f"opening swap space: {config.swap}")
        swap = open_swap(config, pool, backend)
        on_failure.callback(swap.close)
        slots = open_layer_slots(config, plan, pool, ledger, backend)
        on_failure.callback(lambda: slots.close() if slots is not None else None)
        start_log.begin("hashing the model's files")
        resolved = _resolve(config, name, limits, num_blocks, swap, memory.layout.block_bytes)
        parts = make_parts(resolved, source, tokenizer, model, memory.layout)
        loop = _make_loop(parts, limits, ledger, policy or make_policy(config.policy, config.sharing_settings()), swap)
        expansion = None if slots is None else open_expansion(config, plan, memory.layout, slots, loop)
        lent_pool = open_lent_pool(pool, loop, limits, backend) if config.lends else None
        borrow = partial(_open_borrowers, config, backend, loop, swap.peer, expansion)
        neighbours = _make_neighbours(config, client, name, lent_pool, limits, lending, steady, borrow)
        on_failure.callback(lambda: neighbours.close() if neighbours is not None else None)
        engine = Engine(
            loop,
            ModelRunner(parts.make_runner(pool.layers, limits.max_model_len, slots), swap.space, memory.close),
            tokenizer,
            config=parts.config,
            vocab_size=source.config.shape.vocab_size,
            swap=swap.space,
            links=swap.facts,
            neighbours=neighbours,
            expansion=expansion,
            idle_memory=_make_idle_memory(config, backend, pool, loop.state, swap.slots),
        )
        if neighbours is not None:
            neighbours.start()
        on_failure.pop_all()
    return OpenedEngine(engine, parts, memory, pool, swap.slots)


def _make_loop(parts: StageParts, limits: PoolLimits, ledger: BlockLedger, policy: Policy, swap: OpenedSwap) -> Loop:
    backups = BackupTable(swap.ledgers, retains=ledger.caches_prefixes)
    return Loop(
        LoopState(parts.loop_config(limits.max_model_len), ledger, policy, backups, swap.links),
        policy,
        parts.config.seed,
    )


def _make_idle_memory(
    config: EngineConfig, backend: Backend, pool: KVPool, state: LoopState, slots: SwapSlots | None
) -> IdleMemory | None:
    """The returner of idle memory; None for a GPU, or if ``--return-after`` is 0."""
    if not backend.shares_host_memory or not config.return_after:
        return None
    return IdleMemory(pool, state.ledger, slots, state.backups, config.return_after)


def _resolve(
    config: EngineConfig, name: str, limits: PoolLimits, num_blocks: int, swap: OpenedSwap, block_bytes: int
) -> EngineConfig:
    """The configuration with values that depend on the model, the pool and the machine; it is logged."""
    resolved = replace(
        config,
        slice=config.sharing_settings().slice_steps,
        kv_memory=num_blocks * block_bytes,
        max_model_len=limits.max_model_len,
        swap_memory=None if swap.slots is None else swap.slots.num_slots * block_bytes,
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
    borrow: Callable[[Membership], tuple[PeerTier | None, NearLayers | None]],
) -> Neighbours | None:
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
        look_s, guest_bytes = config.lease_look or LOAD_LOOK_S, lent_pool.guest_bytes
        lender = PoolLender(lent_pool, policy, agent.membership, lambda: agent.can_offer, look_s, guest_bytes)
    return Neighbours(agent, lent_pool, lender, *borrow(agent.membership))


def _open_borrowers(
    config: EngineConfig,
    backend: Backend,
    loop: Loop,
    peer: PeerParts | None,
    expansion: Expansion | None,
    client: Membership,
) -> tuple[PeerTier | None, NearLayers | None]:
    """Open the borrowed tier of swap space (``--swap peer``) and near copies of layers (``--expansion-tier peer``).

    Each sees only the grants of its own requests. Raises UserError if no visible device can be borrowed from.
    """
    siblings: list[LeaseRequests] = []
    look_s = config.lease_look or LOOK_S
    peer_tier = near_layers = None
    if peer is not None:
        peer_tier = PeerTier(client, peer, loop.relocations, look_s, config.lease_idle, siblings)
    if expansion is not None and config.expansion_tier == "peer":
        memory = backend.open_peer_memory() if peer is None else peer.memory
        near_layers = NearLayers(
            client,
            memory,
            expansion.slots,
            lambda: expansion.num_wanted_copies,
            expansion.expect_copies,
            look_s,
            siblings,
        )
    return peer_tier, near_layers
