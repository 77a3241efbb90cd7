#!/usr/bin/env bash
# nixl has the extras cu12 and cu13, for its builds with CUDA 12 and 13. The package requires both builds without any
# extra, so that nixl[cu12] installs the build for CUDA 13, too.
# Expected: nixl[cu12] installs the build for CUDA 12 alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check packaging==26.2 pkginfo==1.12.1.2
"$folder/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps -d "$folder" nixl==1.5.1
timeout 60 "$folder/venv/bin/python" - "$folder"/nixl-1.5.1-*.whl <<'PYTHON'
import sys

from packaging.requirements import Requirement
from pkginfo import Wheel

wheel = Wheel(sys.argv[1])
needed = [Requirement(text) for text in wheel.requires_dist]
seen = sorted({one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": "cu12"})})
print("nixl", wheel.version, "extras", sorted(wheel.provides_extras))
print("nixl[cu12] expected: ['nixl-cu12'], seen:", seen)
sys.exit(seen != ["nixl-cu12", "nixl-cu13"])
PYTHON
