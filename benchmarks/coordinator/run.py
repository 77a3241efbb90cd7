"""How many operations does a coordinator take, and what do ten thousand members cost it? See README.md."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.coordinator.connection import connect
from benchmarks.coordinator.load import Load, beat_host, connect_pairs, lend_to_each_other, run_open_loop
from floodplain.observe.strict_json import save_result
from floodplain.web.client import ask_now

HERE = Path(__file__).resolve().parent
SERVER_CORE, CLIENT_CORE = 0, 1
NUM_CONNECTIONS = 256
DEVICES_PER_HOST = 8
BEAT_S = 5.0


@contextmanager
def coordinator(store: Path) -> Iterator[tuple[int, int]]:
    """(process id, port) of a coordinator of its own on one core."""
    command = [sys.executable, "-c", "import sys; from floodplain.cli.main import main; sys.exit(main())"]
    command += ["coordinator", "-q", "--format", "json", "--port", "0", "--ttl", "60", "--store", f"sqlite:///{store}"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, {SERVER_CORE})
    )
    try:
        assert process.stdout is not None
        yield process.pid, int(json.loads(process.stdout.readline())["url"].rpartition(":")[2])
    finally:
        process.terminate()
        process.wait()


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def transactions(port: int) -> tuple[int, float]:
    """(how many, their seconds) of the commits of changes so far."""
    text = ask_now(f"http://127.0.0.1:{port}", "/metrics").text
    values = [
        re.search(rf"^floodplain_coordinator_{name}_total (\S+)$", text, re.MULTILINE)
        for name in ("transactions", "transaction_seconds")
    ]
    return int(float(values[0][1])), float(values[1][1])


def summary(latencies_s: list[float]) -> dict[str, float]:
    """Milliseconds."""
    cuts = quantiles(latencies_s, n=1000)
    return {
        "p50_ms": median(latencies_s) * 1e3,
        "p99_ms": cuts[989] * 1e3,
        "p999_ms": cuts[998] * 1e3,
        "max_ms": max(latencies_s) * 1e3,
    }


async def measure_operations(pid: int, port: int, rate: float, seconds: float, seed: int) -> dict[str, Any]:
    """Operations, then as many requests that ask for nothing but an answer."""
    pairs = await connect_pairs(port, NUM_CONNECTIONS)
    clock = asyncio.get_running_loop().time
    load, before, busy_s = Load(), await asyncio.to_thread(transactions, port), cpu_s(pid)
    own_s = time.process_time()
    await run_open_loop(lambda i, due_s: pairs[i % len(pairs)].operate(load, due_s, clock), rate, seconds, seed)
    busy_s, own_s, after = cpu_s(pid) - busy_s, time.process_time() - own_s, await asyncio.to_thread(transactions, port)
    connections = [await connect(port) for _ in range(NUM_CONNECTIONS)]
    locks = [asyncio.Lock() for _ in connections]
    idle: list[float] = []

    async def ask_nothing(number: int, due_s: float) -> None:
        async with locks[number % NUM_CONNECTIONS]:
            status, _ = await connections[number % NUM_CONNECTIONS].ask("GET", "/health")
            assert status == 200
            idle.append(clock() - due_s)

    await run_open_loop(ask_nothing, rate, seconds / 3, seed)
    num_commits = after[0] - before[0]
    return {
        "seed": seed,
        "operations": len(load.latencies_s),
        "outcomes": dict(sorted(load.outcomes.items())),
        **summary(load.latencies_s),
        "server_cores": busy_s / seconds,
        "client_cores": own_s / seconds,
        "operations_per_commit": len(load.latencies_s) / num_commits,
        "commit_ms": (after[1] - before[1]) / num_commits * 1e3,
        "health_instead": summary(idle),
    }


async def measure_heartbeats(pid: int, port: int, num_devices: int, seconds: float, seed: int) -> dict[str, Any]:
    """Every device of every host lends or borrows one lease; hosts beat evenly over time."""
    names = [f"d{i}" for i in range(num_devices)]
    await lend_to_each_other(await connect(port), names)
    hosts = [names[i : i + DEVICES_PER_HOST] for i in range(0, num_devices, DEVICES_PER_HOST)]
    connections = [await connect(port) for _ in hosts]
    locks = [asyncio.Lock() for _ in hosts]
    latencies_s: list[float] = []
    told: Counter[str] = Counter()

    async def beat(number: int, due_s: float) -> None:
        host = number % len(hosts)
        async with locks[host]:
            told["leases"] += await beat_host(connections[host], hosts[host])
            latencies_s.append(asyncio.get_running_loop().time() - due_s)

    before, busy_s = await asyncio.to_thread(transactions, port), cpu_s(pid)
    await run_open_loop(beat, len(hosts) / BEAT_S, seconds, seed)
    busy_s, after = cpu_s(pid) - busy_s, await asyncio.to_thread(transactions, port)
    return {
        "seed": seed,
        "devices": num_devices,
        "batches": len(latencies_s),
        "leases_told": told["leases"],
        **summary(latencies_s),
        "server_cores": busy_s / seconds,
        "commits": after[0] - before[0],
    }


def main() -> None:
    """Measure, print and write ``result.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=2000.0, help="operations per second")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--folder", type=Path, help="where the stores lie (default: the temporary folder)")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    os.sched_setaffinity(0, {CLIENT_CORE})
    gc.disable()  # the client must not make the server look slow
    runs: dict[str, list[dict[str, Any]]] = {"operations": [], "heartbeats": []}
    for seed in args.seeds:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder, coordinator(Path(folder) / "a.db") as (pid, port):
            runs["operations"].append(asyncio.run(measure_operations(pid, port, args.rate, args.seconds, seed)))
        print(json.dumps(runs["operations"][-1]), flush=True)
        with tempfile.TemporaryDirectory(dir=args.folder) as folder, coordinator(Path(folder) / "b.db") as (pid, port):
            runs["heartbeats"].append(asyncio.run(measure_heartbeats(pid, port, args.devices, args.seconds, seed)))
        print(json.dumps(runs["heartbeats"][-1]), flush=True)
    facts = {
        "command": " ".join(["python", "benchmarks/coordinator/run.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "processor": _processor(),
        "rate": args.rate,
        "seconds": args.seconds,
        "connections": NUM_CONNECTIONS,
    }
    save_result(args.out, {**facts, **runs})


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
