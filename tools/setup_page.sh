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
BIN=.venv-page/bin
"${PYTHON:-python3}" -m venv .venv-page
packages=$("$BIN/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
below=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$below')" > "$packages/below.pth"
"$BIN/pip" install --quiet --quiet --disable-pip-version-check 'playwright==1.65.2'
