"""Snapshots of a server for its page: requests, memory, latencies, leases, and why requests wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from floodplain import __version__
from floodplain.core.blocks import BlockState
from floodplain.core.lifecycle import EndedRequest
from floodplain.core.quantiles import quantile
from floodplain.core.tiers import Tier
from floodplain.engine.outputs import EngineStats
from floodplain.live.changes import Snapshot
from floodplain.live.feed import Look
from floodplain.live.rows import LeaseRow, LiveView
from floodplain.server.protocol import ServingEngine

MOST_LATENCIES = 512
"""Ended requests of which latencies are shown."""


class Latencies:
    """TTFT and TPOT of the last ``MOST_LATENCIES`` requests that ended."""

    def __init__(self) -> None:
        self._values_s: dict[str, deque[float]] = {name: deque(maxlen=MOST_LATENCIES) for name in ("ttft", "tpot")}

    def observe(self, ended: EndedRequest) -> None:
        """Add a request that has ended."""
        for name, value in (("ttft", ended.lifecycle.ttft_s), ("tpot", ended.lifecycle.tpot_s)):
            if value is not None:
                self._values_s[name].append(value)

    def summary(self) -> dict[str, float | int | None]:
        """Medians and 99th percentiles in seconds; None without a value."""
        found: dict[str, float | int | None] = {}
        for name, values_s in self._values_s.items():
            ordered = sorted(values_s)
            for part in (0.5, 0.99):
                found[f"{name}_p{round(100 * part)}_s"] = round(quantile(ordered, part), 6) if ordered else None
        return found | {"num_requests": len(self._values_s["ttft"])}


def memory_of(stats: EngineStats, *, dropped_bytes: int = 0) -> dict[str, int]:
    """Bytes of the KV pool by use, which sum to ``pool``, and bytes outside it.

    In the pool: ``running`` (read by requests on the device), ``moving`` (copies write or read them), ``cached``
    (prefixes that no request uses) and ``free``. Outside: ``swapped`` (KV that live requests need in the host's swap
    space), ``lent`` and ``borrowed`` under leases, and ``expanded`` (copies of layers that stream). ``dropped`` is the
    part of the pool that a group of instances gained by dropping layers.
    """
    pool = stats.kv_bytes.get(Tier.LOCAL.value, 0)
    block_bytes = pool / stats.num_blocks if stats.num_blocks else pool / max(1, sum(stats.kv_blocks.values()))

    def in_state(*states: BlockState) -> int:
        return int(block_bytes * sum(stats.kv_blocks.get(state.value, 0) for state in states))

    running = min(pool, in_state(BlockState.OWNED))
    moving = min(pool - running, in_state(BlockState.LOADING, BlockState.DRAINING))
    cached = min(pool - running - moving, in_state(BlockState.CACHED))
    return {
        "pool": pool,
        "running": running,
        "moving": moving,
        "cached": cached,
        "free": pool - running - moving - cached,
        "swapped": sum(num for tier, num in stats.kv_bytes.items() if tier not in (Tier.LOCAL.value, Tier.PEER.value)),
        "lent": sum(num for (role, _), num in stats.lease_bytes.items() if role == "producer"),
        "borrowed": sum(num for (role, _), num in stats.lease_bytes.items() if role == "consumer"),
        "expanded": stats.expansion.host_bytes,
        "dropped": dropped_bytes,
    }


def snapshot_of(
    view: LiveView, stats: EngineStats, latencies: Mapping[str, float | int | None], facts: Mapping[str, Any]
) -> Snapshot:
    """The snapshot of a server; ``facts`` are constant."""
    block_bytes = stats.kv_bytes.get(Tier.LOCAL.value, 0) // stats.num_blocks if stats.num_blocks else 0
    groups = view.parts.get("groups", {}).get("groups", ())
    dropped = sum(max(0, group["blocks"] - group["own_blocks"]) for group in groups if group["own_blocks"])
    head = {
        **facts,
        "now_s": round(view.now_s, 3),
        "block_bytes": block_bytes,
        "requests": {"running": stats.num_running, "waiting": stats.num_waiting, "swapped": stats.num_swapped},
        "totals": {
            "prompt_tokens": stats.num_prompt_tokens,
            "generated_tokens": stats.num_generated_tokens,
            "preemptions": dict(stats.preemptions),
            "swap_out_bytes": sum(num for (way, _), num in stats.swap_bytes.items() if way == "out"),
            "swap_in_bytes": sum(num for (way, _), num in stats.swap_bytes.items() if way == "in"),
            "steps": stats.num_steps,
        },
        "memory": memory_of(stats, dropped_bytes=dropped * block_bytes),
        "latency": latencies,
        "why": view.why,
        "leases": [_lease(lease) for lease in view.leases],
        **view.parts,
    }
    return Snapshot(head, view.rows)


def _lease(lease: LeaseRow) -> dict[str, Any]:
    due_in_s = None if lease.due_in_s is None else round(lease.due_in_s, 1)
    return {"from": lease.lender, "to": lease.borrower, "bytes": lease.num_bytes, "due_in_s": due_in_s}


def server_looks(engine: ServingEngine, model_name: str, *, can_burst: bool) -> Callable[[], Look]:
    """Opens looks at a server, one whenever a first listener is added; each remembers what it saw."""
    facts = {"service": "server", "version": __version__, "model": model_name, "can_burst": can_burst}
    latencies = Latencies()
    engine.subscribe(latencies.observe)

    def open_look() -> Look:
        watch = engine.watch()

        async def look() -> Snapshot:
            return snapshot_of(watch(), engine.stats(), latencies.summary(), facts)

        return look

    return open_look
