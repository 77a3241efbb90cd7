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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from workloads import CHAT, pool_bytes

from floodplain.engine.build import kv_bytes_per_token
from floodplain.engine.weights.open_model import open_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PORT = 8765
VLLM_BLOCK_TOKENS = 32
MAX_MODEL_LEN = 1024
START_S = 180.0
BURST_S, QUIET_REQUESTS = 60.0, 25

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
        "vllm, fcfs": (vllm, environment),
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
    quiet_s = QUIET_REQUESTS / capacity
    flags = ["--request-rate", str(capacity), "--burst-factor", "2", "--burst-start", str(quiet_s)]
    return [
        *flags,
        "--burst-duration",
        str(BURST_S),
        "--num-prompts",
        str(round(2 * QUIET_REQUESTS + 2 * capacity * BURST_S)),
    ]


def summarise(result: dict[str, Any]) -> dict[str, float]:
    """What the table shows of one result."""
    gaps = [max(itls, default=0.0) for itls in result["itls"]]
    e2e = [ttft + sum(itls) for ttft, itls in zip(result["ttfts"], result["itls"], strict=True)]
    return {
        "TTFT p50": float(np.quantile(result["ttfts"], 0.5)),
        "TTFT p99": float(np.quantile(result["ttfts"], 0.99)),
        "E2E p50": float(np.quantile(e2e, 0.5)),
        "E2E p99": float(np.quantile(e2e, 0.99)),
        "longest gap": max(gaps),
        "tokens/s": result["output_throughput"],
    }


def format_table(runs: Sequence[dict[str, Any]]) -> str:
    """Medians over seeds, and the ratio to vLLM's."""
    names = list(runs[0]["summary"])
    by_way = {
        way: [run["summary"] for run in runs if run["way"] == way] for way in dict.fromkeys(r["way"] for r in runs)
    }
    base = next(iter(by_way.values()))
    lines = ["| server | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for way, summaries in by_way.items():
        cells = []
        for name in names:
            value, reference = (float(np.median([one[name] for one in some])) for some in (summaries, base))
            unit = "" if name == "tokens/s" else " s"
            cells.append(f"{value:.2f}{unit} ({value / reference:.3f}x)")
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Every server under the burst of every seed; keep the summaries, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capacity", type=float, required=True, help="requests per second, from run.py")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--folder", type=Path, default=ROOT / "out/smollm2", help="the model as a folder, for vLLM")
    parser.add_argument("--out", type=Path, default=HERE / "servers.json")
    args = parser.parse_args()
    subprocess.run([sys.executable, str(ROOT / "benchmarks/engine/export_model.py"), str(args.folder)], check=True)
    source = open_model("smollm2")
    per_token = kv_bytes_per_token(source.config, "bfloat16")
    kv_memory = pool_bytes(source.load_tokenizer(), per_token)
    runs: list[dict[str, Any]] = []
    for seed in args.seeds:
        for way, command in commands(kv_memory // per_token, kv_memory, args.folder).items():
            with serving(command):
                result = load(args.capacity, seed, "smollm2")
            runs.append({"way": way, "seed": seed, "failed": result["failed"], "summary": summarise(result)})
            print(f"{way}, seed {seed}: {runs[-1]['summary']}", file=sys.stderr, flush=True)
            kept = {"command": "benchmarks/fairness/servers.py " + " ".join(sys.argv[1:]), "runs": runs}
            args.out.write_text(json.dumps(kept, indent=1) + "\n")
    print(format_table(runs))


if __name__ == "__main__":
    main()
