#!/usr/bin/env bash
# Makes .venv-page: playwright's Python package, over what is installed in .venv. The browser is the system's Chromium
# (Debian: apt-get install chromium), so playwright downloads none.
set -euo pipefail
cd "$(dirname "$0")/.."
BROWSER=${CHROMIUM:-chromium}
command -v "$BROWSER" >/dev/null || {
	echo "there is no $BROWSER: install one (apt-get install chromium), or set CHROMIUM to its path" >&2
	exit 2
}
tools/setup_over.sh .venv-page 'playwright==1.65.2'
