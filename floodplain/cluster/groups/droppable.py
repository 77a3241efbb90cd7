"""An instance that can drop layers: it has all layers while it serves alone, and some in a group (KunServe, section 4).

Each layer's parameters lie in their own pages, which can become KV. On a CPU matrices stay unpacked for this reason.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from floodplain.cluster.groups.member import GroupMember
from floodplain.cluster.groups.role import GroupRole
from floodplain.cluster.instance.instance import Replica, find_own_host
from floodplain.core.errors import UserError
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.backstop import default_backstop_folder, open_backstop
from floodplain.engine.build import OpenedEngine, open_engine
from floodplain.engine.config import EngineConfig


def open_droppable(config: EngineConfig, folder: Path | None, router_host: str) -> Replica:
    """Load a model whose layers can be dropped, and open its backstop.

    Args:
        config: The engine flags.
        folder: Folder of the backstop; None: the default one.
        front_host: The router's host: its network is the one over which other instances reach this one.

    Raises:
        UserError: As ``build_engine``; or the backstop cannot be written, or the pool has too few whole quanta.
    """
    opened = open_engine(replace(config, pack_weights=False))
    try:
        _shrink_to_whole_quanta(opened)
        folder = default_backstop_folder() if folder is None else folder
        backstop = open_backstop(folder, opened.parts.fingerprint, opened.memory.layer_buffers)
        opened.engine.idle_memory = None  # in a group the pool holds blocks that its own ledger does not know
        member = GroupMember(opened, AsyncEngine(opened.engine), backstop, find_own_host(router_host))
        return Replica(member.engine, member, partial(GroupRole, member=member), can_drop=True)
    except BaseException:
        opened.engine.close()
        raise


def _shrink_to_whole_quanta(opened: OpenedEngine) -> None:
    """Release the last, partial quantum: a group divides pages by whole quanta."""
    pool, state = opened.pool, opened.engine.loop.state
    rest = pool.num_blocks % pool.quantum_blocks
    if rest:
        opened.memory.device.release(pool.shrink(state.ledger, pool.num_blocks - rest).pages)
    if pool.num_blocks * state.ledger.block_tokens < state.config.max_model_len:
        raise UserError(
            f"--kv-memory holds {pool.num_blocks * state.ledger.block_tokens} tokens in whole quanta of "
            f"{pool.quantum_blocks} blocks, fewer than --max-model-len {state.config.max_model_len}: raise it"
        )
