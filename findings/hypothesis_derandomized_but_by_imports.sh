#!/usr/bin/env bash
# hypothesis with derandomize=True draws other examples if a module of the project has been imported before that the
# test does not use: literals of loaded modules are among what it draws. Expected: the same test, the same examples.
# A check such as "some example was refused" then depends on which tests ran earlier in the process.
# Exits with 0 as long as that is so.
set -euo pipefail
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
python3 -m venv "$FOLDER/venv"
"$FOLDER/venv/bin/pip" install --quiet --disable-pip-version-check hypothesis==6.170.15
mkdir "$FOLDER/project"
cat > "$FOLDER/project/unused.py" <<'PYTHON'
NAMES = ("a-literal-of-this-module", "another-literal-of-this-module", 987654321)
PYTHON
cat > "$FOLDER/project/draw.py" <<'PYTHON'
import json
import sys

if sys.argv[1] == "imported":
    import unused
from hypothesis import given, settings, strategies as st

seen = []


@settings(derandomize=True, database=None, max_examples=200)
@given(st.text(), st.integers())
def collect(text, number):
    seen.append([text, number])


collect()
print(json.dumps(seen))
PYTHON
cd "$FOLDER/project"
for how in alone alone imported; do timeout 120 "$FOLDER/venv/bin/python" draw.py $how >> "$FOLDER/draws"; done
"$FOLDER/venv/bin/python" - "$FOLDER/draws" <<'PYTHON'
import importlib.metadata
import json
import sys

LITERAL = 987654321


def count(draws):
    return sum("literal-of-this-module" in text or number == LITERAL for text, number in draws)


first, again, imported = [json.loads(line) for line in open(sys.argv[1])]
changed = sum(one != other for one, other in zip(first, imported))
print("hypothesis", importlib.metadata.version("hypothesis"))
print("expected: the same examples in all three runs")
print(f"seen: run again, equal: {first == again}; with one more module loaded, {changed} of {len(first)} differ;")
print(f"      examples with a literal of that module: {count(first)} before, {count(imported)} then")
sys.exit(not (first == again and changed and count(imported) > count(first) == 0))
PYTHON
