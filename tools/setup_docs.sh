#!/usr/bin/env bash
# Makes .venv-docs: mkdocs-material, over what is installed in .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
BIN=.venv-docs/bin
"${PYTHON:-python3}" -m venv .venv-docs
packages=$("$BIN/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
below=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$below')" > "$packages/below.pth"
"$BIN/pip" install --quiet --quiet --disable-pip-version-check -c constraints.txt mkdocs-material
