#!/bin/sh
# Installs what `make test-page` needs: playwright's Python package into .venv. The browser is the system's Chromium
# (Debian: apt-get install chromium), so playwright downloads none.
set -eu
BROWSER=${CHROMIUM:-chromium}
command -v "$BROWSER" >/dev/null || {
	echo "there is no $BROWSER: install one (apt-get install chromium), or set CHROMIUM to its path" >&2
	exit 2
}
.venv/bin/python -m pip install --quiet --disable-pip-version-check 'playwright==1.65.2'
