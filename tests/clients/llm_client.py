"""The command ``llm`` with a schema: llm_client.py URL MODEL. Prints results as JSON; fails loudly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MODELS = """
- model_id: served
  model_name: "%s"
  api_base: "%s/v1"
  supports_schema: true
"""


def main(url: str, model: str) -> None:
    """Ask once with a schema, and once for a stream of text."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "extra-openai-models.yaml").write_text(MODELS % (model, url))
        env = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none", "LLM_LOAD_PLUGINS": ""}
        llm = [str(Path(sys.executable).with_name("llm")), "-m", "served", "--no-log"]
        schema = {"type": "object", "properties": {"side": {"enum": ["left", "right"]}}, "required": ["side"]}
        shown = run([*llm, "--schema", json.dumps({**schema, "additionalProperties": False}), "where?"], env)
        assert json.loads(shown)["side"] in ("left", "right"), shown
        run([*llm, "-o", "max_tokens", "5", "hi"], env)
    print(json.dumps({"checks": 2}))


def run(command: list[str], env: dict[str, str]) -> str:
    """Return what a command prints."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
