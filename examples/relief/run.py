"""A burst that memory is too small for, and a SIGKILL in the middle: no stream loses a token.

    pip install openai
    python examples/relief/run.py

Starts ``floodplain serve smollm2 --instances 2 --relief auto`` with little KV memory. The instances drop layers, one of
them is killed while all clients stream, they drop layers again, and restore them when it is calm. All of it runs on the
CPU of one machine, in two to four minutes; what is printed at the end is the proof: each stream against one engine that
had no burst, and the router's own counters.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI

from floodplain.core.sampling import SamplingParams
from floodplain.engine.llm import LLM

FLOODPLAIN = str(Path(sys.executable).with_name("floodplain"))
MODEL, KV_MEMORY = "smollm2", 32 * 2**20
FLAGS = ("--dtype", "float32", "--kv-memory", str(KV_MEMORY), "--max-model-len", "512")
NUM_STREAMS, NUM_TOKENS, NUM_PROMPT_TOKENS = 48, 80, 64
CALM_S, LIMIT_S = 60.0, 240.0


def main() -> None:
    """Serve the burst, and check every token; exits with 1 if one is wrong."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    prompts = [
        [100 + (7 * number + 5 * place) % 400 for place in range(NUM_PROMPT_TOKENS)] for number in range(NUM_STREAMS)
    ]
    with serving() as url:
        tokens = burst(url, prompts)
        wait(lambda: changes(url).get("restored", 0) >= 1, CALM_S, "no group was restored")
        counted = changes(url)
    num_right = sum(ours == theirs for ours, theirs in zip(tokens, expected(prompts), strict=True))
    print(f"{num_right} of {len(prompts)} streams have the tokens of one engine")
    print(f"groups dropped layers {counted['dropped']} times, and restored them {counted['restored']} times")
    raise SystemExit(0 if num_right == len(prompts) else 1)


def burst(url: str, prompts: list[list[int]]) -> list[list[int]]:
    """Stream all prompts at once; an instance is killed once layers are dropped."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S)
    print(f"{len(prompts)} streams begin", flush=True)
    with ThreadPoolExecutor(len(prompts)) as threads:
        streams = [threads.submit(stream, client, prompt) for prompt in prompts]
        wait(lambda: changes(url).get("dropped", 0) > 0, LIMIT_S, "no layers were dropped")
        (group,) = ask(f"{url}/groups")["groups"]
        print(f"instances share layers {group['layers']}: {group['own_blocks']} KV blocks became {group['blocks']}")
        kill(url)
        tokens = [one.result() for one in streams]
    client.close()
    print(f"{len(prompts)} streams have ended", flush=True)
    return tokens


def stream(client: OpenAI, prompt: list[int]) -> list[int]:
    """The tokens of one streamed completion."""
    extra = {"ignore_eos": True, "return_token_ids": True}
    chunks = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=NUM_TOKENS, temperature=0.0, stream=True, extra_body=extra
    )
    return [token for chunk in chunks for token in chunk.choices[0].token_ids or []]  # type: ignore[attr-defined]


def kill(url: str) -> None:
    """SIGKILL the instance that leads."""
    (leader,) = (row for row in ask(f"{url}/instances")["instances"] if row["state"] == "leading")
    os.kill(leader["pid"], signal.SIGKILL)
    print(f"instance {leader['epoch']} is killed, with {leader['requests']} streams", flush=True)


def expected(prompts: list[list[int]]) -> list[list[int]]:
    """What one engine gives that serves nothing else."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(MODEL, dtype="float32", kv_memory=16 * KV_MEMORY, max_model_len=512) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]


@contextmanager
def serving() -> Iterator[str]:
    """The address of the router; it and its instances end with the context."""
    words = [FLOODPLAIN, "serve", MODEL, *FLAGS, "--instances", "2", "--relief", "auto", "--port", "0", "--quiet"]
    print("$", *words, flush=True)
    with subprocess.Popen([*words, "--format", "json"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise SystemExit("the router did not start")
            yield json.loads(line)["url"]
        finally:
            process.terminate()


def changes(url: str) -> dict[str, int]:
    """How often groups were changed so far, by how."""
    return dict(ask(f"{url}/groups")["changes"])


def ask(url: str) -> Any:
    """The JSON that is there."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def wait(is_so: Any, limit_s: float, why: str) -> None:
    """Return when it is so; exit with the reason if that takes too long."""
    end_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > end_s:
            raise SystemExit(why)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
