"""How many packages a base install brings beside torch and torch's own; nothing is installed.

Usage: packages.py [--out FILE] CHECKOUT... (working trees of the revisions to compare, the baseline first)
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path

DECIDE = ("pyproject.toml", "constraints.txt")


def main() -> None:
    """Print each count, and write the names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("packages.json"))
    args = parser.parse_args()
    result = {"python": platform.python_version(), "torch": [], "revisions": []}
    for checkout in args.checkouts:
        git = ("git", "-C", str(checkout), "log", "-1", "--format=%h", "--abbrev=8", "--", *DECIDE)
        revision = run(*git).strip()  # the last that changed anything in the result
        result["torch"] = torch = resolve(checkout, "torch")
        names = [name for name in resolve(checkout, str(checkout)) if name not in {*torch, "floodplain"}]
        result["revisions"].append({"revision": revision, "count": len(names), "names": names})
        print(f"{revision}: {len(names)} packages beside torch's {len(torch)}", flush=True)
    args.out.write_text(json.dumps(result) + "\n")


def resolve(checkout: Path, requirement: str) -> list[str]:
    """Names of all packages that pip would install, at the versions of the checkout's constraints."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    flags = ("--dry-run", "--ignore-installed", "--report", "-", "-c", str(checkout / "constraints.txt"))
    report = json.loads(run(*pip, *flags, requirement))
    return sorted(one["metadata"]["name"].lower() for one in report["install"])


def run(*command: str) -> str:
    """What it printed; its errors go to ours."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
