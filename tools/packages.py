"""Builds wheel and sdist into dist/, checks them, and tries the wheel in a fresh environment of each Python.

Run by make packages, in .venv-packages. A try installs the wheel at the versions of constraints.txt, without extras,
then serves a tiny model and asks it for tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PYTHONS = ("python3.11", "python3.12", "python3.13")
PATIENCE_S = 120.0


def main() -> None:
    """Build, check and try; exits with 1 at the first fault."""
    shutil.rmtree(DIST, ignore_errors=True)
    _run([sys.executable, "-m", "build", "--outdir", str(DIST)])
    wheel, sdist = next(DIST.glob("*.whl")), next(DIST.glob("*.tar.gz"))
    _run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)])
    _check_files(wheel, sdist)
    found = [name for name in PYTHONS if _runs(name)]
    if not found:
        sys.exit(f"none of {', '.join(PYTHONS)} is on PATH")
    for python in found:
        _try_wheel(wheel, python)
    left_out = [name for name in PYTHONS if name not in found]
    print(f"not tried, because they are not on PATH: {', '.join(left_out)}" if left_out else "tried by every Python")


def _runs(python: str) -> bool:
    """Whether it is there: pyenv's name of a version that is not installed ends with an error."""
    if shutil.which(python) is None:
        return False
    return subprocess.run([python, "-c", "import ensurepip"], stderr=subprocess.DEVNULL, check=False).returncode == 0


def _check_files(wheel: Path, sdist: Path) -> None:
    """Every file of the package that git tracks is in both: modules, pages, migrations, kernels' sources."""
    tracked = subprocess.run(["git", "ls-files", "floodplain"], cwd=ROOT, check=True, capture_output=True, text=True)
    with zipfile.ZipFile(wheel) as archive, tarfile.open(sdist) as tar:
        in_wheel = set(archive.namelist())
        in_sdist = {name.partition("/")[2] for name in tar.getnames()}
    for name, files in ((wheel.name, in_wheel), (sdist.name, in_sdist)):
        if lacking := sorted(set(tracked.stdout.split("\n")) - {""} - files):
            sys.exit(f"{name} lacks {len(lacking)} files of the package, such as {lacking[0]}")
        print(f"{name}: {len(files)} files, {(DIST / name).stat().st_size >> 10} KiB")


def _try_wheel(wheel: Path, python: str) -> None:
    with tempfile.TemporaryDirectory(prefix="floodplain-wheel-") as folder:
        _run([python, "-m", "venv", folder])
        own, floodplain = f"{folder}/bin/python", f"{folder}/bin/floodplain"
        constraints = str(ROOT / "constraints.txt")
        _run([own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints, str(wheel)])
        _run([own, "-m", "pip", "check", "--disable-pip-version-check"])
        _run([floodplain, "--help"], quiet=True)
        tokens = _serve_one(floodplain, Path(folder))
        listed = subprocess.run([own, "-m", "pip", "list", "--format=json"], check=True, capture_output=True, text=True)
        print(f"{python}: {len(json.loads(listed.stdout))} packages, {tokens} tokens served")


def _serve_one(floodplain: str, folder: Path) -> int:
    """Tokens of one request to a tiny model, served outside the repository."""
    command = [floodplain, "serve", "dummy:tiny-llama", "--port", "0", "--kv-memory", "1MiB", "--format", "json", "-q"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            ready = json.loads(server.stdout.readline())
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
            server.kill()
    return int(tokens)


def _run(command: Sequence[str], *, quiet: bool = False) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    subprocess.run(command, cwd=ROOT, check=True, env=environ, stdout=subprocess.DEVNULL if quiet else None)


if __name__ == "__main__":
    main()
