"""llama.cpp's server, from the wheel ``xllamacpp``, in a process of its own. It prints ``{"url": ...}``."""

from __future__ import annotations

import argparse
import json
import signal

import xllamacpp

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("weights", help="a .gguf file")
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--kv-tokens", type=int, default=4096, help="of all slots together")
parser.add_argument("--slots", type=int, default=4, help="requests at a time; each has an equal part of the KV cache")
parser.add_argument("--shared", action="store_true", help="one KV cache for all slots, without parts")
parser.add_argument("--threads", type=int, default=1)
args = parser.parse_args()
params = xllamacpp.CommonParams()
params.model.path, params.port = args.weights, args.port
params.n_ctx, params.n_parallel, params.kv_unified = args.kv_tokens, args.slots, args.shared
params.cache_prompt, params.cache_ram_mib = False, 0  # no prefix is kept
params.endpoint_metrics = True
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
server = xllamacpp.Server(params)
print(json.dumps({"url": server.listening_address}), flush=True)
signal.pause()
