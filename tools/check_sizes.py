"""Lists files over 500 and functions over 60 lines; fails unless each is excused here, by name and with a reason."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
ROOT = Path(__file__).resolve().parent.parent
EXCUSED = {
    "floodplain/model/attention/paged_decode.py:paged_decode": "a Triton launch: sizes, grid, arguments",
    "floodplain/model/attention/paged_decode.py:_attend": "a Triton kernel: it cannot call plain functions",
}


def find_long(path: Path) -> list[str]:
    """Every part of one file that is too long, as ``name: lines``."""
    name = str(path.relative_to(ROOT))
    text = path.read_text()
    num_lines = len(text.splitlines())
    found = [f"{name}: {num_lines} lines"] if num_lines > MAX_FILE_LINES and name not in EXCUSED else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            label = f"{name}:{node.name}"
            if length > MAX_FUNCTION_LINES and label not in EXCUSED:
                found.append(f"{label}: {length} lines")
    return found


def main() -> int:
    """Check the whole package."""
    found = [line for path in sorted((ROOT / "floodplain").rglob("*.py")) for line in find_long(path)]
    unused = [name for name in EXCUSED if not (ROOT / name.partition(":")[0]).exists()]
    for line in [*found, *(f"{name}: excused but not there" for name in unused)]:
        print(line)
    return 1 if found or unused else 0


if __name__ == "__main__":
    sys.exit(main())
