"""The program of one engine under chaos: it serves a load with known tokens, and reports its state.

Reads commands from its standard input: ``load N`` (requests alive), ``jump S`` (its lease clock), ``exit``. Writes its
state as a line of JSON ten times a second.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

from floodplain.core.request import Request, SeqId
from floodplain.core.sampling import SamplingParams
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.shell import Engine
from floodplain.lending import peer_tier
from floodplain.lending.client import CoordinatorClient
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.policy.lending import LendingSettings
from tests.support.parity import Reference, judge
from tests.support.swapping import BLOCK_BYTES, ImpatientPolicy

DEADLINE_S = 2.0
TTL_S = 2
POOL_PAGES, BORROWED_PAGES = 32, 8
MAX_TOKENS = 24
BASE: dict[str, Any] = {"model": "dummy:tiny-llama", "dtype": "float32", "max_model_len": 128}
PACE_S = 0.01
"""Seconds between two steps: six processes share two cores."""
QUICK = LendingSettings(calm_s=0.4, busy_s=0.05, window_s=0.8, rate_window_s=0.4, rise_sigmas=1e9)


class State:
    """State that commands change."""

    def __init__(self, num_live: int) -> None:
        self.num_live = num_live
        self.jump_s = 0.0
        self.is_over = False

    def obey(self) -> None:
        """Read commands until standard input is closed, which means that the sender has exited."""
        for line in sys.stdin:
            word, _, value = line.strip().partition(" ")
            if word == "load":
                self.num_live = int(value)
            elif word == "jump":
                self.jump_s += float(value)
            else:
                break
        self.is_over = True


def build(role: str, url: str, name: str) -> Engine:
    """Return an engine that lends nearly all of its pool while idle, or one that borrows and swaps all the time."""
    if role == "producer":
        flags = {"kv_memory": POOL_PAGES * PAGE_BYTES, "swap": "none", "policy": "fcfs", "lend": "auto"}
        config = EngineConfig(**BASE, **flags, coordinator=url, device_name=name, recall_deadline=DEADLINE_S)
        return build_engine(config, lending=QUICK)
    peer_tier.CHUNK_BYTES = PAGE_BYTES
    flags = {"kv_memory": 24 * BLOCK_BYTES, "swap": "peer", "swap_memory": 48 * BLOCK_BYTES}
    config = EngineConfig(**BASE, **flags, peer_memory=BORROWED_PAGES * PAGE_BYTES, coordinator=url, device_name=name)
    return build_engine(config, ImpatientPolicy())


class Load:
    """Repeats the known requests."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], references: Sequence[Reference]) -> None:
        self._engine, self._prompts, self._references = engine, prompts, references
        self._open: dict[SeqId, tuple[int, list[int]]] = {}
        self._numbers = count()
        self.num_checked = self.num_wrong = self.num_excused = 0

    def step(self, num_live: int) -> None:
        """Run one step and judge the requests that have ended."""
        while len(self._open) < num_live:
            number = next(self._numbers)
            which = number % len(self._prompts)
            params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
            prompt, now = tuple(self._prompts[which]), time.monotonic()
            request = Request(request_id=str(number), prompt_token_ids=prompt, params=params, arrival_s=now)
            self._open[self._engine.add(request)] = which, []
        for seq_id, delta in self._engine.step():
            which, tokens = self._open[seq_id]
            tokens += delta.token_ids
            if delta.finish_reason is not None:
                del self._open[seq_id]
                verdict = judge([self._references[which]], [tokens])
                self.num_checked += 1
                self.num_excused += len(verdict.excused)
                self.num_wrong += len(verdict.wrong)


class Exchanges:
    """Counts the requests to the coordinator that the calling thread sends: its steps must not wait for the network."""

    def __init__(self) -> None:
        self.num = 0
        thread, exchange = threading.get_ident(), CoordinatorClient._exchange

        def counted(client: CoordinatorClient, *args: Any) -> Any:
            self.num += threading.get_ident() == thread
            return exchange(client, *args)

        CoordinatorClient._exchange = counted  # type: ignore[method-assign]


def describe(engine: Engine, load: Load, exchanges: Exchanges) -> dict[str, Any]:
    """Return the state of the process."""
    assert engine.neighbours is not None
    peer, membership = engine.neighbours.peer_tier, engine.neighbours.agent.membership
    totals = {} if peer is None else {name: getattr(peer.totals, name) for name in peer.totals.__slots__}
    return {
        "checked": load.num_checked,
        "wrong": load.num_wrong,
        "excused": load.num_excused,
        "exchanges_in_steps": exchanges.num,
        "held": 0 if peer is None else len(peer._held),
        "pool_blocks": engine.loop.state.ledger.num_blocks,
        "leases": {f"{role} {end}": size for (role, end), size in membership.lease_bytes().items()},
        "joined": membership.has_joined,
        "failed_transfers": sum(engine.stats().failed_transfers.values()),
        "swapped_bytes": {f"{way} {tier}": size for (way, tier), size in engine.stats().swap_bytes.items()},
        **totals,
    }


def main(role: str, url: str, name: str, references_file: str) -> None:
    """Serve until told to stop."""
    known = json.loads(Path(references_file).read_text())
    references = [Reference(one["token_ids"], one["gaps"]) for one in known]
    state = State(num_live=6 if role == "consumer" else 1)
    with closing(build(role, url, name)) as engine:
        assert engine.neighbours is not None
        membership = engine.neighbours.agent.membership
        clock = membership._clock
        membership._clock = lambda: clock() + state.jump_s
        threading.Thread(target=state.obey, daemon=True).start()
        load, said_s = Load(engine, [one["prompt"] for one in known], references), 0.0
        exchanges = Exchanges()
        while not state.is_over:
            load.step(state.num_live)
            engine.loop.check_integrity()
            now = time.monotonic()
            if now - said_s > 0.1:
                print(json.dumps(describe(engine, load, exchanges)), flush=True)
                said_s = now
            time.sleep(PACE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
