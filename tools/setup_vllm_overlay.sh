#!/usr/bin/env bash
# tools/setup_vllm_overlay.sh 0.33: makes .venv-vllm-0.33 beside .venv-vllm, with the Python of vLLM 0.33 and the CPU
# kernels, torch and other requirements of .venv-vllm. For versions of vLLM that have no build for CPUs.
set -euo pipefail
cd "$(dirname "$0")/.."
VERSION=$1
ENV=.venv-vllm-$VERSION
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
BASE=$(site .venv-vllm)
rm -rf "$ENV"
.venv-vllm/bin/python -m venv --without-pip "$ENV"
SITE=$(site "$ENV")
echo "$BASE" > "$SITE/base.pth"

DOWNLOAD=$(mktemp -d)
trap 'rm -rf "$DOWNLOAD"' EXIT
.venv-vllm/bin/pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: -d "$DOWNLOAD" "vllm==$VERSION.*"
"$ENV/bin/python" - "$DOWNLOAD"/vllm-*.whl "$SITE" "$BASE" <<'PYTHON'
import re
import shutil
import sys
from pathlib import Path
from zipfile import ZipFile

wheel, site, base = map(Path, sys.argv[1:])
with ZipFile(wheel) as archive:
    archive.extractall(site, [name for name in archive.namelist() if not name.endswith(".so")])
for kernels in (base / "vllm").glob("*.so"):
    shutil.copy(kernels, site / "vllm")
[info] = site.glob("vllm-*.dist-info")
metadata = info / "METADATA"
# vLLM serves on a CPU if its version says so.
metadata.write_text(re.sub(r"(?m)^Version: .*", r"\g<0>+cpu", metadata.read_text(), count=1))
info.rename(info.with_name(info.name.replace(".dist-info", "+cpu.dist-info")))
PYTHON
# 0.33 requires it, and 0.32 does not.
.venv-vllm/bin/pip install --quiet --disable-pip-version-check --target "$SITE" orjson
"$ENV/bin/python" -c "import vllm; print('vllm', vllm.__version__)"
