"""What the live page costs a server with 1,000 live requests: processor time with and without listeners.

Usage: run.py [--requests N] [--running N] [--seconds S] [--out FILE]

The server is ours, over an engine that computes nothing: its loop's real sequences grow by tokens, are preempted,
swapped in and replaced at set rates. So all processor time of the process above that without a listener is the page's:
looking at the sequences, finding what changed, encoding and sending it. Listeners run in processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from floodplain.core.blocks import BlockLedger
from floodplain.core.lifecycle import EndedRequest, EventKind
from floodplain.core.request import FinishReason, Request
from floodplain.core.sampling import SamplingParams
from floodplain.core.sequence import Sequence, Status
from floodplain.engine.outputs import EngineStats, OutputDelta
from floodplain.engine.watch import EngineWatch
from floodplain.live.feed import PERIOD_S
from floodplain.live.rows import LiveView
from floodplain.model.tokenizer import ByteTokenizer
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopConfig, LoopState
from floodplain.server.app import Server
from floodplain.web.address import bind, url_of
from floodplain.web.limits import limit_connections

TOKENS_PER_S = 25
"""Of each running request: a token in 40 ms."""
SWAPS_PER_S, ENDS_PER_S = 20, 10
"""Requests that are swapped out while another is swapped in, and requests that end while another arrives."""
PROMPT = tuple(range(200))


class StillEngine:
    """A ``ServingEngine`` whose requests live without being computed. ``advance`` is called between two updates."""

    model_name, max_model_len, vocab_size = "still", 4096, 256
    failure: BaseException | None = None
    can_serve = True
    num_live = 0
    """None is waited for when the server stops."""

    def __init__(self, num_requests: int, num_running: int) -> None:
        self.tokenizer = ByteTokenizer(256)
        self._dice = Random(0)
        config = LoopConfig(max_model_len=4096, max_num_seqs=num_running, max_waiting=10**9)
        policy = FcfsPolicy()
        self.loop = Loop(LoopState(config, BlockLedger(4096, 16), policy), policy)
        for _ in range(num_requests):
            self._arrive()
        self._seqs = list(self.loop.state.sequences.values())
        for seq in self._seqs[:num_running]:
            self._enter(seq)
        for seq in self._seqs[num_running : 2 * num_running]:
            self._enter(seq)
            self._leave(seq)

    def _arrive(self) -> Sequence:
        request = Request(request_id="r", prompt_token_ids=PROMPT, params=SamplingParams(), arrival_s=time.monotonic())
        return self.loop.state.sequences[self.loop.submit(request)]

    def _enter(self, seq: Sequence) -> None:
        is_first = seq.status is Status.WAITING
        seq.status, seq.blocks = Status.RUNNING, [0] * 20  # type: ignore[list-item]
        seq.lifecycle.record(EventKind.SCHEDULED if is_first else EventKind.SWAPPED_IN, time.monotonic(), 20)

    def _leave(self, seq: Sequence) -> None:
        seq.status, seq.blocks = Status.SWAPPED, []
        seq.lifecycle.record(EventKind.PREEMPTED, time.monotonic(), 20)

    def advance(self, period_s: float) -> None:
        """Let the requests live for so many seconds."""
        by_status = {status: [seq for seq in self._seqs if seq.status is status] for status in Status}
        now = time.monotonic()
        for seq in by_status[Status.RUNNING]:
            for _ in range(round(TOKENS_PER_S * period_s)):
                seq.tokens.append(1)
                seq.lifecycle.token_times_s.append(now)
        for _ in range(round(SWAPS_PER_S * period_s)):
            self._leave(by_status[Status.RUNNING].pop())
            self._enter(by_status[Status.SWAPPED].pop(self._dice.randrange(len(by_status[Status.SWAPPED]))))
        for _ in range(round(ENDS_PER_S * period_s)):
            ended, first = by_status[Status.RUNNING].pop(0), by_status[Status.WAITING].pop(0)
            ended.status, ended.finish_reason = Status.FINISHED, FinishReason.STOP
            ended.lifecycle.record(EventKind.FINISHED, now)
            self._seqs.remove(ended)
            del self.loop.state.sequences[ended.seq_id]
            self._seqs.append(self._arrive())
            self._enter(first)

    # -- ServingEngine ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Nothing to start."""

    async def drain(self, timeout_s: float) -> None:
        """Nothing to drain."""

    async def close(self) -> None:
        """Nothing to close."""

    async def generate(
        self, request: Request, *, on_accepted: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Generate nothing."""
        return
        yield

    def stats(self) -> EngineStats:
        """As a real engine's: the same fields are read."""
        blocks = {state.value: count for state, count in self.loop.state.ledger.count_states().items()}
        return EngineStats(kv_blocks=blocks, kv_bytes={"local": 4096 * 2**15, "host": 2**27}, num_blocks=4096)

    def watch(self) -> Callable[[], LiveView]:
        """The real watch over this loop."""
        return EngineWatch(SimpleNamespace(loop=self.loop, clock=time.monotonic, neighbours=None))  # type: ignore[arg-type]

    def subscribe(self, on_finished: Callable[[EndedRequest], None], /) -> None:
        """Never call it: no request ends by itself."""


LISTENER = """
import sys, httpx
size = 0
with httpx.stream("GET", sys.argv[1] + "/live", timeout=60) as answer:
    try:
        for part in answer.iter_raw():
            size += len(part)
            print(size, flush=True)
    except httpx.HTTPError:
        pass
"""


async def measure(server: Server, engine: StillEngine, url: str, num_listeners: int, seconds: float) -> dict[str, Any]:
    """Processor time of this process for so many seconds with so many listeners, and the bytes that one got."""
    command = [sys.executable, "-c", LISTENER, url]
    listeners = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(num_listeners)]
    for one in listeners:
        assert one.stdout is not None
        await asyncio.to_thread(one.stdout.readline)
    begin_cpu_s, begin_s, num_updates = time.process_time(), time.monotonic(), 0
    while time.monotonic() - begin_s < seconds:
        engine.advance(PERIOD_S)
        num_updates += 1
        await asyncio.sleep(PERIOD_S)
    cpu_s, wall_s = time.process_time() - begin_cpu_s, time.monotonic() - begin_s
    sizes = []
    for one in listeners:
        one.terminate()
        sizes.append(int((await asyncio.to_thread(one.communicate))[0].split()[-1]))
    return {"update_s": cpu_s / num_updates, "updates_per_s": num_updates / wall_s, "bytes": max(sizes, default=0)}


async def run(num_requests: int, num_running: int, seconds: float, rounds: int) -> dict[str, Any]:
    """All numbers of listeners in turns, ``rounds`` times; the share of a core above that without a listener."""
    engine = StillEngine(num_requests, num_running)
    sock = bind("127.0.0.1", 0)
    sock.listen()
    server = Server(engine, keys=None, drain_timeout_s=0.0, on_ready=lambda: None, limits=limit_connections(None))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    await asyncio.sleep(1.0)
    found: dict[int, list[dict[str, Any]]] = {0: [], 1: [], 8: []}
    for _ in range(rounds):
        for num_listeners, results in found.items():
            results.append(await measure(server, engine, url_of(sock), num_listeners, seconds))
    server.stop()
    await serving
    alone_s = statistics.median(one["update_s"] for one in found[0])
    return {
        "requests": num_requests,
        "running": num_running,
        "seconds": seconds,
        "rounds": rounds,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "core_percent_without_listener": round(percent_of_core(alone_s), 2),
        "listeners": {
            str(number): summary([percent_of_core(one["update_s"] - alone_s) for one in results], results, seconds)
            for number, results in found.items()
            if number
        },
    }


def percent_of_core(update_s: float) -> float:
    """Processor seconds of an update, as percent of a core at the feed's rate (a loaded machine's is lower)."""
    return 100 * update_s / PERIOD_S


def summary(percents: list[float], results: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The figures of one number of listeners."""
    return {
        "core_percent": [round(one, 2) for one in percents],
        "median_core_percent": round(statistics.median(percents), 2),
        "updates_per_s": round(statistics.median(one["updates_per_s"] for one in results), 2),
        "kib_per_s": round(statistics.median(one["bytes"] for one in results) / seconds / 1024, 1),
    }


def main() -> None:
    """Measure, and print or write the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = asyncio.run(run(args.requests, args.running, args.seconds, args.rounds))
    text = json.dumps(result, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
