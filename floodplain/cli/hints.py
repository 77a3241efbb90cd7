"""Hints for mistyped flags, and for flags that people know from other servers (vLLM, SGLang, llama.cpp)."""

from __future__ import annotations

import re

from floodplain.files.similar import nearest

FLAG_SIMILARITY = 0.6
"""Least similarity of a likely flag."""

_DEVICE = "an engine computes on one device; --instances N --pipeline divides the layers of a model among N engines"
_KV = "the memory of the KV pool is --kv-memory SIZE, by default 90% of what is free on a GPU"
_LENGTH = "write --max-model-len N"
_SWAP = "write --swap-memory SIZE"
_TLS = "put a proxy with TLS in front of --host and --port"
_LORA = "adapters are not served: merge them into the weights"
_MODEL = "write the model without a flag"
_ON = "leave it out, it is always on"
_GPU = "all layers are on --device cuda"
_INSTANCES = "write --instances N"
_STAGES = "write --instances N --pipeline"
_SEQS = "write --max-num-seqs N"
_BATCH = "write --max-batched-tokens N"
_THREADS = "set the variable OMP_NUM_THREADS"
_KERNELS = "leave it out: the engine has its own attention kernels"
_WEIGHTS = "leave it out: weights are read into memory"
OTHER_FLAGS = {
    "--api-key": "write the key into a file for --api-key-file",
    "--block-size": "write --block-tokens N",
    "--chat-template": "chats are rendered by the model's own template",
    "--chunked-prefill-size": _BATCH,
    "--cont-batching": _ON,
    "--context-length": _LENGTH,
    "--cpu-offload-gb": "weights stay on the device; what KV does not need there can be in host memory: --swap-memory",
    "--ctx-size": _LENGTH,
    "--data-parallel-size": _INSTANCES,
    "--disable-log-requests": "requests are not logged; write --quiet for results and errors only",
    "--disable-radix-cache": "write --no-enable-prefix-caching",
    "--distributed-executor-backend": "Ray starts the instances with --cluster auto",
    "--download-dir": "set the variable HF_HOME",
    "--dp": _INSTANCES,
    "--dp-size": _INSTANCES,
    "--enable-auto-tool-choice": _ON,
    "--enable-chunked-prefill": _ON,
    "--enable-lora": _LORA,
    "--enforce-eager": "leave it out: no graphs are captured",
    "--flash-attn": _KERNELS,
    "--gpu-layers": _GPU,
    "--gpu-memory-utilization": _KV,
    "--hf-repo": _MODEL,
    "--hf-token": "set the variable HF_TOKEN",
    "--jinja": _ON,
    "--kv-cache-dtype": "KV has the number format of the weights: --dtype",
    "--kv-cache-memory-bytes": _KV,
    "--kv-offloading-size": _SWAP,
    "--load-format": "leave it out: the format is read from the files",
    "--lora-modules": _LORA,
    "--max-num-batched-tokens": _BATCH,
    "--max-running-requests": _SEQS,
    "--max-total-tokens": _KV,
    "--mem-fraction-static": _KV,
    "--metrics": _ON,
    "--mlock": _WEIGHTS,
    "--model": "its value is missing: write the model's name behind it",
    "--model-path": _MODEL,
    "--n-gpu-layers": _GPU,
    "--no-mmap": _WEIGHTS,
    "--num-gpu-blocks-override": _KV,
    "--parallel": _SEQS,
    "--pipeline-parallel-size": _STAGES,
    "--pp-size": _STAGES,
    "--quantization": "leave it out: of quantized models .gguf files are read, and computed in --dtype",
    "--reasoning-parser": "reasoning is part of the text",
    "--revision": "write MODEL@REVISION",
    "--schedule-policy": "write --policy",
    "--scheduling-policy": "write --policy",
    "--speculative-config": "there is no speculative decoding",
    "--ssl-certfile": _TLS,
    "--ssl-keyfile": _TLS,
    "--swap-space": _SWAP,
    "--tensor-parallel-size": _DEVICE,
    "--threads": _THREADS,
    "--tokenizer": "the model's own tokenizer is used",
    "--tp": _DEVICE,
    "--tp-size": _DEVICE,
    "--trust-remote-code": "leave it out: a model's own code is never run",
    "-c": _LENGTH,
    "-cb": _ON,
    "-dp": _INSTANCES,
    "-fa": _KERNELS,
    "-hf": _MODEL,
    "-m": _MODEL,
    "-ngl": _GPU,
    "-np": _SEQS,
    "-pp": _STAGES,
    "-t": _THREADS,
    "-tp": _DEVICE,
}
"""What to write instead of another server's flag of an engine."""


def hint_for(flag: str, known: set[str]) -> str:
    """The end of a message about an unknown flag of a verb whose flags are ``known``."""
    told = OTHER_FLAGS.get(flag.replace("_", "-"), "")  # vLLM takes both
    is_of_engine = "--kv-memory" in known and known >= set(re.findall(r"--[a-z-]+", told))
    return f": {told}" if told and is_of_engine else _near_flag(flag, known)


def _near_flag(flag: str, known: set[str]) -> str:
    """As ``did_you_mean``, by the letters without the dashes; one letter stands for no other."""
    by_letters = {name.lstrip("-"): name for name in known}
    near = nearest(flag.lstrip("-"), by_letters, FLAG_SIMILARITY)
    return f" (did you mean {by_letters[near]}?)" if near else ""


def is_bundled(token: str) -> bool:
    """Whether argparse would read another server's flag as several of one letter: ``-hf`` as ``-h -f``."""
    return token.startswith("-h") and len(token) > 2
