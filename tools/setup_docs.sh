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
# Draws the diagrams; the theme would load it from another site.
npm pack --silent --pack-destination .venv-docs mermaid@11.17.2 > /dev/null
tar -xzf .venv-docs/mermaid-11.17.2.tgz -C .venv-docs --strip-components=2 package/dist/mermaid.min.js
rm .venv-docs/mermaid-11.17.2.tgz
