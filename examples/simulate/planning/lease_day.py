"""Leases: all GPUs over the whole day, with the load of the sampled windows; and the messages to the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.simulate.planning.day import SLOT_S
from examples.simulate.planning.gpus import BORROWER, HERE, LENDER, Gpus
from examples.simulate.planning.quiet import QuietCoordinator
from examples.simulate.planning.signals import PoolSignal, SignalMembers, SignalSettings
from examples.simulate.planning.windows import Window
from floodplain.sim.environment import Environment
from floodplain.sim.machine import resolve_machine
from floodplain.sim.scenario import make_scenario

LOOK_S, SAMPLE_S = 30.0, 60.0
"""Seconds between two looks of a GPU at its load, and between two samples of lent bytes."""
SERVER_FAULTS = ((10 * 3600.0, 600.0), (15 * 3600.0, 600.0), (20 * 3600.0, 600.0))
"""When a server dies, and for how long; the first, then others."""
COORDINATOR_FAULTS = ((3 * 3600.0, 3 * 3600.0 + 60), (15 * 3600.0 - 60, 15 * 3600.0 + 60))
"""When no coordinator answers; during the second, a server dies."""


def simulate_leases(
    gpus: Gpus, windows: Sequence[Window], content: Mapping[str, Any], num_slots: int, seed: int
) -> dict[str, Any]:
    """Leases and messages of all GPUs; each has the signal of the window whose load is nearest to its own."""
    environment = Environment()
    coordinator = QuietCoordinator(environment, 10.0, gpus.pairs, SAMPLE_S)
    members = SignalMembers(coordinator, _settings(content))
    offsets = np.random.default_rng(seed)
    start = {}
    for name in gpus.names[LENDER]:
        signal = _lender_signal(gpus, name, windows, content, int(offsets.integers(SLOT_S)))
        start[name] = lambda name=name, signal=signal: members.lend(name, signal)
    for name in gpus.names[BORROWER]:
        need = _borrower_need(gpus, name, windows, int(offsets.integers(SLOT_S)))
        start[name] = lambda name=name, need=need: members.borrow(name, need)
    for place, begin in enumerate(start.values()):
        environment.schedule(LOOK_S * place / len(start), begin)
    end_s = float(num_slots * SLOT_S)
    _schedule_faults(environment, members, gpus, start, end_s)
    environment.run(end_s)
    return _report(members, end_s, len(start))


def _schedule_faults(
    environment: Environment,
    members: SignalMembers,
    gpus: Gpus,
    start: Mapping[str, Callable[[], None]],
    end_s: float,
) -> None:
    for (at_s, down_s), server in zip(SERVER_FAULTS, gpus.servers, strict=False):
        for name in server if at_s + down_s < end_s else ():
            is_lender = name in gpus.names[LENDER]
            environment.schedule(at_s, lambda name=name, lost=is_lender: members.kill(name, is_device_lost=lost))
            environment.schedule(at_s + down_s, start[name])
    for down_s, up_s in COORDINATOR_FAULTS:
        if up_s < end_s:
            environment.schedule(down_s, members.coordinator.stop)
            environment.schedule(up_s, members.coordinator.start)


def _settings(content: Mapping[str, Any]) -> SignalSettings:
    scenario = make_scenario(dict(content), "pair", HERE)
    machine, lender = resolve_machine(scenario), resolve_machine(scenario.lenders[LENDER])
    assert scenario.borrow is not None
    block_tokens = scenario.lenders[LENDER].engine.block_tokens
    return SignalSettings(
        lender_block_bytes=lender.block_bytes,
        full_blocks=lender.num_blocks,
        least_blocks=-(-lender.max_model_len // block_tokens),
        borrower_block_bytes=machine.block_bytes,
        lease_bytes=scenario.borrow.lease,
        most_bytes=scenario.borrow.memory,
        idle_s=scenario.borrow.idle,
        bandwidth=min(link.bandwidth for link in machine.links),
        look_s=LOOK_S,
    )


def _nearest(windows: Sequence[Window], side: int, rates: NDArray[np.float64]) -> list[Window]:
    """The window whose load is nearest to each rate, by their quotient."""
    logs = np.log(np.maximum([window.rates[side] for window in windows], 1e-3))
    places = np.abs(np.log(np.maximum(rates, 1e-3))[:, None] - logs[None, :]).argmin(axis=1)
    return [windows[place] for place in places]


def _lender_signal(
    gpus: Gpus, name: str, windows: Sequence[Window], content: Mapping[str, Any], offset: int
) -> Callable[[float], PoolSignal]:
    rates = gpus.rates[LENDER][gpus.names[LENDER].index(name)]
    mean = content["lenders"][LENDER]["workload"]["request_rate"]
    nearest = _nearest(windows, 1, rates)
    before = np.concatenate([[0.0], np.cumsum(rates)]) * mean * SLOT_S

    def signal(now: float) -> PoolSignal:
        slot = min(int(now // SLOT_S), len(nearest) - 1)
        window, inside = nearest[slot], now - slot * SLOT_S
        used, waiting = window.lender_load[int(now + offset) % len(window.lender_load)]
        scale = rates[slot] / max(window.rates[1], 1e-3)
        return PoolSignal(int(used * scale), waiting, int(before[slot] + rates[slot] * mean * inside))

    return signal


def _borrower_need(gpus: Gpus, name: str, windows: Sequence[Window], offset: int) -> Callable[[float], int]:
    rates = gpus.rates[BORROWER][gpus.names[BORROWER].index(name)]
    nearest = _nearest(windows, 0, rates)

    def need(now: float) -> int:
        window = nearest[min(int(now // SLOT_S), len(nearest) - 1)]
        return window.needed_bytes[int(now + offset) % len(window.needed_bytes)]

    return need


def _report(members: SignalMembers, end_s: float, num_members: int) -> dict[str, Any]:
    coordinator, totals = members.coordinator, members.coordinator.totals
    times, lent = (np.array(column, dtype=float) for column in zip(*totals.samples, strict=True))
    seconds = np.diff(np.append(times, end_s))
    others = sum(number for kind, number in coordinator.num_messages.items() if kind not in ("heartbeat", "join"))
    return {
        "leases": dict(totals.num_leases),
        "bytes": dict(totals.num_bytes) | {"live": sum(totals.live.values())},
        "lent_bytes": {
            "mean": float((lent * seconds).sum() / end_s),
            "max": float(lent.max()),
            "hourly": [float(_mean_between(times, lent, h * 3600, (h + 1) * 3600)) for h in range(int(end_s // 3600))],
        },
        "recalled_kv_bytes": {"to_host": members.counts["moved"], "recomputed": members.counts["lost"]},
        "needed_without_lease": members.short_byte_s / max(members.needed_byte_s, 1.0),
        "messages": dict(coordinator.num_messages),
        "messages_per_s": {
            "operations_mean": others / end_s,
            "operations_max": max(coordinator.per_second.values(), default=0),
            "heartbeats_at_most": num_members,
        },
    }


def _mean_between(times: NDArray[np.float64], values: NDArray[np.float64], start_s: float, end_s: float) -> float:
    """The mean of a step function over an interval."""
    edges = np.append(times[(times > start_s) & (times < end_s)], end_s)
    edges = np.insert(edges, 0, start_s)
    places = np.searchsorted(times, edges[:-1], side="right") - 1
    held = np.where(places >= 0, values[places], 0.0)
    return float((held * np.diff(edges)).sum() / (end_s - start_s))
