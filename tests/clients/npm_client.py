"""npm's ``openai`` and ``ai`` against a server: npm_client.py URL MODEL. Prints results as JSON; fails loudly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "npm"
PACKAGES = ("openai", "ai", "@ai-sdk/openai-compatible")


def main(url: str, model: str) -> None:
    """Run the script beside this one by node, with the packages of the environment."""
    script = Path(__file__).with_suffix(".mjs")
    done = subprocess.run(
        ["node", script, FOLDER, url, model], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    for name in PACKAGES:
        result[name] = json.loads((FOLDER / "node_modules" / name / "package.json").read_text())["version"]
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
