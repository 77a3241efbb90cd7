#!/usr/bin/env bash
# tools/setup_over.sh FOLDER PACKAGE...: makes an environment of these packages over what is installed in .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
ENV=$1
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
"${PYTHON:-python3}" -m venv "$ENV"
below=$(site .venv)
own=$(site "$ENV")
echo "import site; site.addsitedir('$below')" > "$own/below.pth"
"$ENV/bin/pip" install --quiet --quiet --disable-pip-version-check -c constraints.txt "${@:2}"
