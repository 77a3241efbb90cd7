#!/usr/bin/env bash
# Makes .venv-docs: mkdocs-material, over what is installed in .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/setup_over.sh .venv-docs mkdocs-material
# Draws the diagrams; the theme would load it from another site.
npm pack --silent --pack-destination .venv-docs mermaid@11.17.2 > /dev/null
tar -xzf .venv-docs/mermaid-11.17.2.tgz -C .venv-docs --strip-components=2 package/dist/mermaid.min.js
rm .venv-docs/mermaid-11.17.2.tgz
