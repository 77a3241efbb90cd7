"""llama.cpp's server and ours under the same burst over HTTP: a table, and runs as JSON.

Run it in our environment, on an idle machine: ``.venv/bin/python -m benchmarks.peers.llamacpp``. ``make test-clients``
makes the environment with llama.cpp's server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers.reading import reading_lists
from benchmarks.peers.tables import format_columns, pool, summarise
from benchmarks.run_columns import latency_lists
from benchmarks.vllm.story import BLOCK_TOKENS, MAX_MODEL_LEN, MAX_NUM_SEQS, make_burst
from floodplain.demo.cluster import VerbProcess
from floodplain.model.weights.open_model import packaged_smollm2
from floodplain.observe.strict_json import save_result
from floodplain.workload.client import run_load
from floodplain.workload.goals import sample_requests, unloaded_goals_s
from floodplain.workload.http_target import HttpTarget
from floodplain.workload.records import LoadRequest, RequestRecord

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODEL = "smollm2"
KV_TOKENS = 4096
KV_MEMORY = "90MiB"
"""For as many tokens: 30 layers, keys and values of 3 heads of 64 numbers in 16 bits."""
LLAMA = {
    "llama.cpp, 4 slots": ["--slots", str(KV_TOKENS // MAX_MODEL_LEN)],
    "llama.cpp, 64 slots": ["--slots", str(MAX_NUM_SEQS), "--shared"],
}
OURS = {
    "timely": ["--policy", "timely", "--swap", "host", "--swap-memory", "1GiB"],
    "fcfs, no swap": ["--policy", "fcfs", "--swap", "none"],
}
WAYS = (*OURS, *LLAMA)


@contextmanager
def serving(way: str, folder: Path, python: Path) -> Iterator[str]:
    """Yield the address of a way's server, which ends with the context."""
    log = folder / f"{way}.log"
    if way in OURS:
        with VerbProcess(our_words(way), log, num_threads=os.cpu_count()) as process:
            yield str(process.wait_ready()["url"])
        return
    with log.open("wb") as errors:
        process = subprocess.Popen(llama_words(way, python), stdout=subprocess.PIPE, stderr=errors)
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"{way} did not start: {log.read_text(errors='replace')[-500:]}")
            yield str(json.loads(line)["url"])
        finally:
            process.terminate()


def our_words(way: str) -> list[str]:
    """Return the words of ``floodplain`` that start a server."""
    return [
        "serve", MODEL, "--port", "0", "--quiet", *OURS[way], "--kv-memory", KV_MEMORY,
        "--block-tokens", str(BLOCK_TOKENS), "--max-model-len", str(MAX_MODEL_LEN),
        "--max-num-seqs", str(MAX_NUM_SEQS), "--no-enable-prefix-caching", "--return-after", "0",
    ]  # fmt: skip


def llama_words(way: str, python: Path) -> list[str]:
    """Return the command that starts llama.cpp's server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        str(python), str(HERE / "llama_server.py"), str(packaged_smollm2()), "--port", str(port),
        "--kv-tokens", str(KV_TOKENS), "--threads", str(os.cpu_count()), *LLAMA[way],
    ]  # fmt: skip


def send(url: str, requests: Sequence[LoadRequest], max_concurrency: int | None = None) -> list[RequestRecord]:
    """Send requests as ``bench serve`` does."""
    return asyncio.run(run_load(HttpTarget(url, MODEL), requests, progress=False, max_concurrency=max_concurrency))


def find_goals_s(url: str, burst: Sequence[LoadRequest]) -> list[float]:
    """Return TTFT and TPOT goals of a server, five times the medians of requests like these, alone. Warms it up."""
    send(url, [replace(one, arrival_s=0.0, max_tokens=32) for one in make_burst(0, 8, 1.0)])
    _, *alone = send(url, sample_requests(burst), 1)
    goals_s = unloaded_goals_s((record.sent_s, record.token_times_s) for record in alone)
    return [round(goals_s[name], 4) for name in ("ttft", "tpot")]


def measure(url: str, burst: Sequence[LoadRequest], goals_s: Sequence[float]) -> dict[str, Any]:
    """Return a run as columns need it (``run_columns``, ``reading``)."""
    records = send(url, burst)
    for record, request in zip(records, burst, strict=True):
        assert record.error or len(record.token_times_s) == request.max_tokens, record
    times = [(record.sent_s, record.token_times_s) for record in records if record.error is None]
    return {
        "duration_s": round(max(record.finished_s for record in records) - records[0].sent_s, 4),
        "goals_s": list(goals_s), "failed": len(records) - len(times),
        "errors": sorted({record.error for record in records if record.error}),
        **latency_lists(times), **reading_lists(times, goals_s),
    }  # fmt: skip


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """Return the goals, alone at each server and for all, and a run of each seed and way.

    All servers run from the beginning; those without requests compute nothing. Every second seed has the reverse order.
    """
    bursts = {seed: make_burst(seed, args.requests, args.rate) for seed in args.seeds}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        urls = {way: stack.enter_context(serving(way, Path(folder), args.python)) for way in args.ways}
        alone = {way: find_goals_s(url, bursts[args.seeds[0]]) for way, url in urls.items()}
        goals_s, runs = [max(each) for each in zip(*alone.values(), strict=True)], []
        for number, (seed, burst) in enumerate(bursts.items()):
            for way in args.ways if number % 2 == 0 else reversed(args.ways):
                found = {"way": way, "load": "burst", "seed": seed, **measure(urls[way], burst, goals_s)}
                runs.append(found)
                print(seed, way, summarise(found), flush=True)
    failed = {f"{run['way']}, seed {run['seed']}": [run["failed"], run["errors"]] for run in runs if run["failed"]}
    return {"goals_s": goals_s, "goals_alone_s": alone, "rows": pool(runs), "failed": failed}


def format_result(result: Mapping[str, Any]) -> str:
    """Return the goals, the table, and why requests failed."""
    ttft_s, tpot_s = result["goals_s"]
    lines = [f"goals: TTFT {1e3 * ttft_s:.0f} ms, TPOT {1e3 * tpot_s:.0f} ms", "", *format_columns(result["rows"]), ""]
    return "\n".join(lines + [f"{run}: {n} failed ({'; '.join(why)})" for run, (n, why) in result["failed"].items()])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rate", type=float, default=4.58, help="requests per second")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-clients/bin/python", help="which has xllamacpp")
    parser.add_argument("--out", type=Path, default=HERE / "llamacpp.json")
    parser.add_argument("--show", type=Path, help="measure nothing; the table of this file")
    args = parser.parse_args()
    if args.show:
        print(format_result(json.loads(args.show.read_text())))
        return
    found = measure_all(args)
    words = ["PYTHON" if word == str(args.python) else word for word in sys.argv[1:]]  # no path of this machine
    command = " ".join(["python", "-m", "benchmarks.peers.llamacpp", *words])
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    save_result(args.out, {"command": command, "machine": machine, **found})
    print(format_result(found))


if __name__ == "__main__":
    main()
