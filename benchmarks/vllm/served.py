"""vLLM's own client (``vllm bench serve``) against its own server, stock and with the plug-in: what it prints.

Run it in vLLM's environment: ``.venv-vllm/bin/python -m benchmarks.vllm.served``.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from floodplain.observe.strict_json import save_result

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
START_S, CLIENT_S, STOP_S = 300.0, 900.0, 30.0
SERVER = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model")
OURS = (sys.executable, "-c", "from floodplain.cli.main import main; raise SystemExit(main())", "vllm", "serve")
CLIENT = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""``vllm bench serve`` itself needs a distribution that is called vllm; the community build for CPUs is not."""
KEYS = {
    "median_ttft_ms": "TTFT p50", "p99_ttft_ms": "p99 (ms)", "median_tpot_ms": "TPOT p50", "p99_tpot_ms": "p99 (ms)",
    "median_e2el_ms": "E2E p50", "p99_e2el_ms": "p99 (ms)", "output_throughput": "tokens/s", "completed": "completed",
}  # fmt: skip


def server_command(way: str, model: Path, port: int, kv_blocks: int) -> list[str]:
    """``stock``, or ``floodplain vllm serve`` with a policy."""
    flags = [
        "--port", str(port), "--served-model-name", "smollm2", "--dtype", "bfloat16", "--block-size", "32",
        "--num-gpu-blocks-override", str(kv_blocks), "--max-model-len", "1024", "--no-enable-prefix-caching",
        "--max-num-seqs", "64",
    ]  # fmt: skip
    if way == "stock":
        return [*SERVER, str(model), *flags]
    return [*OURS, str(model), "--policy", way, "--swap-memory", "1GiB", "--", *flags]


@contextmanager
def serving(command: Sequence[str], port: int, log: Path) -> Iterator[None]:
    """A server that answers; ended afterwards."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment.setdefault("OMP_WAIT_POLICY", "passive")  # as our command sets it: the same for stock
    environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{(os.cpu_count() or 1) - 1}"
    with log.open("wb") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=out) as server:
        try:
            _wait(port, server, log)
            yield
        finally:
            server.terminate()
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()


def _wait(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
            return
        except urllib.error.URLError:
            time.sleep(0.5)
    raise SystemExit(f"the server did not start:\n{log.read_text()[-2000:]}")


def client_command(model: Path, port: int, args: argparse.Namespace, out: Path) -> list[str]:
    """vLLM's client: random prompts of 100 to 300 tokens, 75 to 225 tokens out, Poisson arrivals."""
    return [
        sys.executable, "-c", CLIENT, "--backend", "openai", "--base-url", f"http://127.0.0.1:{port}",
        "--model", "smollm2", "--tokenizer", str(model),
        "--dataset-name", "random", "--random-input-len", "200", "--random-output-len", "150",
        "--random-range-ratio", "0.5", "--num-prompts", str(args.requests), "--request-rate", str(args.rate),
        "--seed", str(args.seed), "--ignore-eos", "--percentile-metrics", "ttft,tpot,e2el", "--num-warmups", "4",
        "--save-result", "--result-dir", str(out.parent), "--result-filename", out.name,
    ]  # fmt: skip


def measure(way: str, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One server, one client."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        with serving(server_command(way, model, port, args.kv_tokens // 32), port, Path(folder) / "log"):
            subprocess.run(client_command(model, port, args, out), check=True, timeout=CLIENT_S, stdout=sys.stderr)
        found = json.loads(out.read_text())
    return {"way": way} | {key: round(found[key], 2) for key in KEYS}


def format_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """A row for each run."""
    lines = [f"| way | {' | '.join(KEYS.values())} |", "|---" * (1 + len(KEYS)) + "|"]
    lines += [f"| {run['way']} | {' | '.join(f'{run[key]:.0f}' for key in KEYS)} |" for run in runs]
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", default=["stock", "paced"])
    parser.add_argument("--rate", type=float, default=4.58, help="requests per second")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--kv-tokens", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE / "served.json")
    args = parser.parse_args()
    model = ROOT / "out/smollm2"
    subprocess.run([sys.executable, str(ROOT / "tools/export_smollm2.py"), str(model)], check=True)
    runs = [measure(way, model, args) for way in args.ways]
    command = " ".join(["python", "-m", "benchmarks.vllm.served", *sys.argv[1:]])
    save_result(args.out, {"command": command, "runs": runs})
    print(format_table(runs))


if __name__ == "__main__":
    main()
