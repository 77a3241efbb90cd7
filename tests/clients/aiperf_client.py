"""aiperf's profile of streamed chats: aiperf_client.py URL MODEL. Prints results as JSON; fails loudly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

NUM_REQUESTS, NUM_OUTPUT = 8, 8
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
"""Not for aiperf: it then looks for a tokenizer in the hub's cache alone, also if it is given as a folder."""


def main(url: str, model: str) -> None:
    """Profile a few requests."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            Path(sys.executable).with_name("aiperf"), "profile", "--model", model, "--url", url,
            "--endpoint-type", "chat",
            "--streaming", "--tokenizer", model, "--request-count", NUM_REQUESTS, "--concurrency", 2, "--isl", 24,
            "--osl", NUM_OUTPUT, "--extra-inputs", "ignore_eos:true", "--ui-type", "none",
            "--output-artifact-dir", folder,
        ]  # fmt: skip
        env = {name: value for name, value in os.environ.items() if name not in OFFLINE}
        done = subprocess.run(map(str, command), env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        (found,) = Path(folder).rglob("profile_export_aiperf.json")
        result = json.loads(found.read_text())
    assert result["request_count"]["avg"] == NUM_REQUESTS, result["request_count"]
    print(json.dumps({"completed": NUM_REQUESTS}))


if __name__ == "__main__":
    main(*sys.argv[1:])
