"""What the live page costs a server with 1,000 live requests: processor time with and without listeners.

Usage: run.py [--requests N] [--running N] [--seconds S] [--rounds N] [--out FILE]

The server, the engine (a tiny model) and its leases are real, but no step is run: between two updates requests get
tokens, are swapped out and in, end and arrive at set rates. So all processor time of the process above that without a
listener is the page's: looking at the engine and its statistics, finding what changed, encoding and sending it.
Listeners run in processes of their own.
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
from typing import Any

from floodplain.core.lifecycle import EndedRequest, EventKind
from floodplain.core.quantiles import quantile
from floodplain.core.request import FinishReason, Request
from floodplain.core.sampling import SamplingParams
from floodplain.core.sequence import Sequence, Status
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.outputs import EngineStats, OutputDelta
from floodplain.engine.watch import EngineWatch
from floodplain.leases.book import LeaseBook
from floodplain.leases.messages import Heartbeat, Join, Offer, Recall
from floodplain.leases.rows import Shard
from floodplain.leases.states import Stamp
from floodplain.lending.agent import LeaseAgent
from floodplain.lending.client import CoordinatorClient
from floodplain.lending.neighbours import Neighbours
from floodplain.live.changes import Snapshot
from floodplain.live.feed import PERIOD_S, Feed
from floodplain.live.rows import LiveView
from floodplain.server.app import Server
from floodplain.web.address import bind, url_of
from floodplain.web.limits import limit_connections

TOKENS_PER_S = 25
"""Of each running request: a token in 40 ms."""
SWAPS_PER_S, ENDS_PER_S = 20, 10
"""Requests that are swapped out while another is swapped in, and requests that end while another arrives."""
PROMPT = tuple(range(200))
NUM_BLOCKS, BLOCKS_EACH = 8192, 20
"""KV blocks of the pool, and of each running request."""
NUM_LENDERS, LEASES_EACH, LEASE_BYTES = 4, 16, 2**25


class UpdateTimes:
    """Processor seconds of each update of the feed: from its look until its messages are queued, in one go."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun_s = 0.0
        publish = Feed._publish

        def publish_and_end(feed: Feed, last: Snapshot, now: Snapshot) -> None:
            publish(feed, last, now)
            self.seconds.append(time.thread_time() - self._begun_s)

        Feed._publish = publish_and_end  # type: ignore[method-assign]

    def begin(self) -> None:
        """Begin an update, on the thread of the feed."""
        self._begun_s = time.thread_time()


class StillEngine:
    """A ``ServingEngine`` over a real engine that runs no step. ``advance`` is called between two updates."""

    failure: BaseException | None = None
    can_serve = True
    num_live = 0
    """None is waited for when the server stops."""

    def __init__(self, num_requests: int, num_running: int) -> None:
        config = EngineConfig(
            model="dummy:tiny-llama", dtype="float32", policy="fair", kv_memory=NUM_BLOCKS * 8192, swap_memory=2**26,
            max_num_seqs=num_running, max_waiting=10**9, max_model_len=1024, enable_prefix_caching=False,
        )  # fmt: skip
        self.engine = build_engine(config)
        self.engine.neighbours = borrowed_leases()
        self.tokenizer, self.model_name = self.engine.tokenizer, self.engine.model_name
        self.max_model_len, self.vocab_size = self.engine.max_model_len, self.engine.vocab_size
        self.updates = UpdateTimes()
        self._dice = Random(0)
        seqs = [self._arrive() for _ in range(num_requests)]
        for seq in seqs[num_running : 2 * num_running]:
            self._enter(seq)
            self._swap_out(seq)
        for seq in seqs[:num_running]:
            self._enter(seq)

    def _arrive(self) -> Sequence:
        request = Request(
            request_id="r", prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=800), arrival_s=time.monotonic()
        )
        return self.engine.loop.state.sequences[self.engine.add(request)]

    def _enter(self, seq: Sequence) -> None:
        state, is_first = self.engine.loop.state, seq.status is Status.WAITING
        if not is_first:
            state.enter(seq, Status.LOADING)
        blocks = state.ledger.allocate(BLOCKS_EACH)
        assert blocks is not None, "the pool has room for all"
        state.enter(seq, Status.RUNNING)
        seq.blocks = blocks
        kind = EventKind.SCHEDULED if is_first else EventKind.SWAPPED_IN
        seq.lifecycle.record(kind, time.monotonic(), 0 if is_first else BLOCKS_EACH)

    def _swap_out(self, seq: Sequence) -> None:
        state = self.engine.loop.state
        state.ledger.free(seq.blocks)
        seq.blocks = []
        state.enter(seq, Status.SWAPPED)
        seq.lifecycle.record(EventKind.PREEMPTED, time.monotonic(), BLOCKS_EACH)

    def advance(self, period_s: float) -> None:
        """Let the requests live for so many seconds."""
        state, now = self.engine.loop.state, time.monotonic()
        for seq in state.running:
            for _ in range(round(TOKENS_PER_S * period_s)):
                seq.tokens.append(1)
                seq.lifecycle.token_times_s.append(now)
        for _ in range(round(SWAPS_PER_S * period_s)):
            self._swap_out(state.running[-1])
            self._enter(self._dice.choice(state.swapped))
        for _ in range(round(ENDS_PER_S * period_s)):
            self.engine.finish(state.running[0].seq_id, FinishReason.STOP)
            self._arrive()
            self._enter(state.waiting.head()[0])
        self.engine.take_finished()

    # -- ServingEngine ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Nothing to start."""

    async def drain(self, timeout_s: float) -> None:
        """Nothing to drain."""

    async def close(self) -> None:
        """Free the engine's memory."""
        self.engine.neighbours = None  # its agent was not started
        self.engine.close()

    async def generate(
        self, request: Request, *, on_accepted: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Generate nothing."""
        return
        yield

    def stats(self) -> EngineStats:
        """The engine's."""
        return self.engine.stats()

    def watch(self) -> Callable[[], LiveView]:
        """The real watch, whose call begins an update."""
        watch = EngineWatch(self.engine)

        def look() -> LiveView:
            self.updates.begin()
            return watch()

        return look

    def subscribe(self, on_finished: Callable[[EndedRequest], None], /) -> None:
        """Never call it: no request ends by itself."""


def borrowed_leases() -> Neighbours:
    """Neighbours with granted leases of several lenders, each with one recalled, by a coordinator's book in here."""
    agent = LeaseAgent(CoordinatorClient("http://127.0.0.1:9"), "chat")  # not started: it sends nothing
    book, membership, lenders = LeaseBook(1e9, 0.0), agent.membership, [f"gpu-{n}" for n in range(NUM_LENDERS)]
    for name in lenders:
        size = LEASES_EACH * LEASE_BYTES
        book.handle_all([Join(name, "life"), Offer(name, Stamp(1, 1), size), Heartbeat(name, 1)], 0.0)

    def exchange() -> None:
        messages, sent_s = membership.collect()
        membership.learn(messages, book.handle_all(messages, 0.0), 1e9, sent_s)

    exchange()
    for name in lenders:
        for _ in range(LEASES_EACH):
            membership.ask([Shard(LEASE_BYTES, name)])
    exchange()
    for lease in membership.to_allocate():
        membership.allocated(lease.lease_id)
    for name in lenders:
        book.handle(Recall(name, Stamp(1, 2), LEASE_BYTES, 1e6), 0.0)
    exchange()
    exchange()
    known = membership.list_leases()
    num_recalled = sum(due_in_s is not None for *_, due_in_s in known)
    assert (len(known), num_recalled) == (NUM_LENDERS * LEASES_EACH, NUM_LENDERS), (len(known), num_recalled)
    return Neighbours(agent)


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
    engine.updates.seconds.clear()
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
    return {
        "update_s": cpu_s / num_updates,
        "updates_per_s": num_updates / wall_s,
        "bytes": max(sizes, default=0),
        "own_s": list(engine.updates.seconds),
    }


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
    """The figures of one number of listeners. An update's own time is that without its sending."""
    own_ms = [1e3 * one_s for result in results for one_s in result["own_s"]]
    return {
        "update_ms": {
            name: round(quantile(own_ms, part), 2) for name, part in (("p50", 0.5), ("p99", 0.99), ("max", 1))
        },
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
