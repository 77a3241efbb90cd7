"""Builds wheel and sdist into dist/, checks them, and tries both in a fresh environment of each Python.

Run by make packages, in .venv-packages. A try installs the wheel at the versions of constraints.txt, without extras,
serves a tiny model and asks it for tokens; then it installs the sdist in the wheel's place and does the same.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from serve_once import serve_once

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PYTHONS = ("python3.11", "python3.12", "python3.13")


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
        _try(wheel, sdist, python)
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


def _try(wheel: Path, sdist: Path, python: str) -> None:
    with tempfile.TemporaryDirectory(prefix="floodplain-package-") as folder:
        _run([python, "-m", "venv", folder])
        own, floodplain = f"{folder}/bin/python", f"{folder}/bin/floodplain"
        install = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*install, "-c", str(ROOT / "constraints.txt"), str(wheel)])
        _run([own, "-m", "pip", "check", "--disable-pip-version-check"])
        _run([floodplain, "--help"], quiet=True)
        tokens = serve_once(floodplain, Path(folder))
        listed = subprocess.run([own, "-m", "pip", "list", "--format=json"], check=True, capture_output=True, text=True)
        print(f"{python}: {len(json.loads(listed.stdout))} packages, {tokens} tokens served from the wheel")
        _run([*install, "--no-deps", "--force-reinstall", str(sdist)])
        print(f"{python}: {serve_once(floodplain, Path(folder))} tokens served from the sdist", flush=True)


def _run(command: Sequence[str], *, quiet: bool = False) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    subprocess.run(command, cwd=ROOT, check=True, env=environ, stdout=subprocess.DEVNULL if quiet else None)


if __name__ == "__main__":
    main()
