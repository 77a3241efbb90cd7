#!/usr/bin/env bash
# pydantic reads an integer field from JSON numbers with a fraction of zero, 1000.0 or 1e3. Above 2**53 it rounds some of
# them without an error, and it refuses 1e22 as larger than its maximum, while it reads the same number written in digits.
# Expected: the number that is written, or a refusal because it cannot be held; in both spellings the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pydantic==2.14.4
timeout 60 "$folder/venv/bin/python" - <<'PYTHON'
import sys
from fractions import Fraction

import pydantic

reader = pydantic.TypeAdapter(int)


def read(text):
    try:
        return reader.validate_json(text)
    except pydantic.ValidationError as error:
        return error.errors()[0]["type"]


print("pydantic", pydantic.VERSION)
seen = {}
for text in ("9007199254740993", "9007199254740993.0", "10000000000000000000000", "1e22"):
    seen[text] = read(text)
    print(f"{text}: expected {int(Fraction(text))}, seen {seen[text]}")
wanted = {"9007199254740993": 2**53 + 1, "9007199254740993.0": 2**53,
          "10000000000000000000000": 10**22, "1e22": "int_parsing_size"}
sys.exit(seen != wanted)
PYTHON
