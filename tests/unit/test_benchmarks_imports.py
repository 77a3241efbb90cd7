"""Modules of benchmarks and examples are found by their whole names, however they are started."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_module_imports_its_neighbours_by_their_whole_names() -> None:
    """A bare name is found by ``python FOLDER/FILE.py`` only, and not by ``python -m`` or in a test."""
    bare = []
    for path in [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("examples/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            bare += [f"{path.relative_to(ROOT)}: {name}" for name in names if path.with_name(f"{name}.py").exists()]
    assert not bare
