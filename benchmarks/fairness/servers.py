"""The same burst over HTTP: vLLM's server and ours, one after the other, with the same client; see README.md."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from run import machine, without_folder
from table import format_table
from workloads import BURST_S, CHAT, NUM_BEFORE, TAIL_S, pool_bytes

from floodplain.engine.build import kv_bytes_per_token
from floodplain.engine.weights.open_model import open_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PORT = 8765
VLLM_BLOCK_TOKENS = 32
MAX_MODEL_LEN = 1024
START_S = 180.0
BASELINE = "vllm, fcfs"

Command = tuple[list[str], dict[str, str]]


def commands(kv_tokens: int, kv_memory: int, folder: Path) -> dict[str, Command]:
    """How each server is started, all with the same KV cache."""
    vllm = [str(ROOT / ".venv-vllm/bin/python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    vllm += ["--served-model-name", "smollm2", "--dtype", "bfloat16", "--block-size", str(VLLM_BLOCK_TOKENS)]
    vllm += ["--num-gpu-blocks-override", str(kv_tokens // VLLM_BLOCK_TOKENS), "--port", str(PORT)]
    vllm += ["--max-model-len", str(MAX_MODEL_LEN), "--disable-log-stats"]
    ours = [str(ROOT / ".venv/bin/floodplain"), "serve", "smollm2", "--dtype", "bfloat16", "--port", str(PORT)]
    ours += ["--kv-memory", str(kv_memory), "--max-model-len", str(MAX_MODEL_LEN)]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
    return {
        BASELINE: (vllm, environment),
        "floodplain, fcfs": ([*ours, "--policy", "fcfs", "--swap", "none"], {}),
        "floodplain, paced/pcie": ([*ours, "--hardware", "emulated-pcie5"], {}),
    }


@contextmanager
def serving(command: Command) -> Iterator[None]:
    """The server of this command, ready; it ends with the context."""
    arguments, environment = command
    with subprocess.Popen(arguments, env=os.environ | environment, stdout=subprocess.DEVNULL) as process:
        try:
            _wait_until_ready(process)
            yield
        finally:
            process.terminate()
            process.wait(60)


def _wait_until_ready(process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            sys.exit(f"the server ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    sys.exit(f"the server was not ready after {START_S:.0f} s")


def load(capacity: float, seed: int, tokenizer: str) -> dict[str, Any]:
    """Send the burst to whatever serves, after a few requests that warm it up; return the client's result."""
    rounds = [["--num-prompts", "8"], _burst(capacity)]
    result: dict[str, Any] = {}
    for number, flags in enumerate(rounds):
        command = [str(ROOT / ".venv/bin/floodplain"), "bench", "serve", "--base-url", f"http://127.0.0.1:{PORT}"]
        command += ["--model", "smollm2", "--tokenizer", tokenizer, "--ignore-eos", "--quiet", "--format", "json"]
        command += ["--length-scale", str(CHAT.length_scale), "--max-input", str(CHAT.max_input)]
        command += ["--max-output", str(CHAT.max_output), "--seed", str(seed + 1000 * (1 - number)), *flags]
        result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return result


def _burst(capacity: float) -> list[str]:
    """The load ``burst`` of ``workloads.py``, in the client's words."""
    num_requests = round(NUM_BEFORE + capacity * (2 * BURST_S + TAIL_S))
    flags = {
        "--request-rate": capacity,
        "--burst-factor": 2,
        "--burst-start": NUM_BEFORE / capacity,
        "--burst-duration": BURST_S,
        "--num-prompts": num_requests,
    }
    return [str(word) for pair in flags.items() for word in pair]


def in_turn(names: list[str], seed: int) -> list[str]:
    """The baseline first and last, since the machine's speed wanders; the others in another order for every seed."""
    others = [name for name in names if name != BASELINE]
    shift = seed % len(others)
    return [BASELINE, *others[shift:], *others[:shift], BASELINE]


def as_run(way: str, seed: int, capacity: float, started: str, result: dict[str, Any]) -> dict[str, Any]:
    """A client's result in the form of ``measure.py``'s runs.

    Raises:
        SystemExit: A request failed.
    """
    if result["failed"]:
        sys.exit(f"{way}, seed {seed}: {result['failed']} requests failed")
    return {
        "process": started,
        "way": way,
        "load": "burst",
        "seed": seed,
        "capacity": capacity,
        "duration_s": result["duration"],
        "output_tokens": result["total_output_tokens"],
        "ttft_s": result["ttfts"],
        "e2e_s": [ttft + sum(itls) for ttft, itls in zip(result["ttfts"], result["itls"], strict=True)],
        "longest_gap_s": [max(itls, default=0.0) for itls in result["itls"]],
        "max_send_lag_s": result["floodplain"]["max_send_lag_s"],
    }


def main() -> None:
    """Every server under the burst of every seed; keep every request's times, print the table."""
    args = _parse()
    subprocess.run([sys.executable, str(ROOT / "tools/export_smollm2.py"), str(args.folder)], check=True)
    source = open_model("smollm2")
    per_token = kv_bytes_per_token(source.config, "bfloat16")
    kv_memory = pool_bytes(source.load_tokenizer(), per_token)
    servers = commands(kv_memory // per_token, kv_memory, args.folder)
    kept: dict[str, Any] = {"commands": [], "machine": machine(), "runs": []}
    if args.resume and args.out.exists():
        kept = json.loads(args.out.read_text())
    kept["commands"].append(" ".join(["benchmarks/fairness/servers.py", *map(without_folder, sys.argv[1:])]))
    for seed in args.seeds:
        started = datetime.now(UTC).isoformat(timespec="seconds")
        for way in in_turn(list(servers), seed):
            with serving(servers[way]):
                result = load(args.capacity, seed, "smollm2")
            kept["runs"].append(as_run(way, seed, args.capacity, started, result))
            args.out.write_text(json.dumps(kept) + "\n")
            print(f"{way}, seed {seed}", file=sys.stderr, flush=True)
    print(format_table(kept["runs"], BASELINE))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capacity", type=float, required=True, help="requests per second, from run.py")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--folder", type=Path, default=ROOT / "out/smollm2", help="the model as a folder, for vLLM")
    parser.add_argument("--resume", action="store_true", help="add to the runs that --out holds")
    parser.add_argument("--out", type=Path, default=HERE / "servers.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
