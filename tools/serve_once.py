"""Starts a server of a tiny model, asks it for tokens and stops it. Needs no other file: an image runs it too."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

PATIENCE_S = 120.0


def serve_once(floodplain: str, folder: Path) -> int:
    """Tokens of one request to a server that the program ``floodplain`` starts in a folder. Exits with 1 on a fault."""
    command = [floodplain, "serve", "dummy:tiny-llama", "--port", "0", "--kv-memory", "1MiB", "--format", "json", "-q"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        watchdog = threading.Timer(PATIENCE_S, server.kill)
        watchdog.start()
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if not line:
                sys.exit(f"the server ended with status {server.wait()} before it was ready")
            ready = json.loads(line)
            body = json.dumps({"model": ready["model"], "prompt": "the river", "max_tokens": 4, "ignore_eos": True})
            request = urllib.request.Request(
                f"{ready['url']}/v1/completions", body.encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                tokens = json.load(answer)["usage"]["completion_tokens"]
            server.send_signal(signal.SIGTERM)
            if server.wait(PATIENCE_S) != 0:
                sys.exit(f"the server ended with status {server.returncode}")
        finally:
            watchdog.cancel()
            server.kill()
    return int(tokens)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as own:
        print(serve_once("floodplain", Path(own)), "tokens served")
