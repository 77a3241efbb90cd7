#!/usr/bin/env bash
# aiperf with HF_HUB_OFFLINE=1 does not load a tokenizer from a folder: it takes the path for a name of the hub and looks
# in the cache alone. Expected: a folder needs no hub, and its help names "local path" as one way to give a tokenizer.
# transformers loads the same folder under the same setting, and aiperf loads it without the setting.
# Exits with 0 as long as that is so.
set -euo pipefail
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
python3 -m venv "$FOLDER/venv"
"$FOLDER/venv/bin/pip" install --quiet --disable-pip-version-check aiperf==0.13.0
cat > "$FOLDER/load.py" <<'PYTHON'
import importlib.metadata
import os
import sys

folder = sys.argv[1]
if not os.path.exists(folder):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder)

from aiperf.common.tokenizer import Tokenizer
from transformers import AutoTokenizer

assert len(AutoTokenizer.from_pretrained(folder)) == 3
try:
    Tokenizer.from_pretrained(folder)
    found = "loaded"
except Exception as error:
    found = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
setting = os.environ.get("HF_HUB_OFFLINE", "not set")
print(f"aiperf {importlib.metadata.version('aiperf')}, HF_HUB_OFFLINE {setting}: transformers loaded, aiperf {found}")
sys.exit((found == "loaded") == (setting == "1"))
PYTHON
unset TRANSFORMERS_OFFLINE
env -u HF_HUB_OFFLINE "$FOLDER/venv/bin/python" "$FOLDER/load.py" "$FOLDER/tokenizer"
HF_HUB_OFFLINE=1 "$FOLDER/venv/bin/python" "$FOLDER/load.py" "$FOLDER/tokenizer"
