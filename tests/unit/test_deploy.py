"""The files of deploy/: every command that they start is one that there is."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tests.support.command_lines import find_complaint, parsers

DEPLOY = Path(__file__).parents[2] / "deploy"


def deployed_commands(source: str) -> list[list[str]]:
    """Commands of containers in YAML, compose's variables by their defaults."""
    found, todo = [], [*yaml.safe_load_all(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", source))]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            found += [part[key] for key in ("args", "command") if key in part and part[key][0] in parsers()]
            todo += part.values()
        elif isinstance(part, list):
            todo += part
    return found


def test_every_deployed_command_parses() -> None:
    files = [path for path in DEPLOY.rglob("*.yaml") if path.name[0] != "."]
    commands = [(path.name, command) for path in files for command in deployed_commands(path.read_text())]
    assert sorted(name for name, _ in commands) == sorted(
        ["compose.yaml"] * 3 + ["coordinator.yaml", "group.yaml", "group.yaml", "server.yaml"]
    )
    assert not [(name, command, wrong) for name, command in commands if (wrong := find_complaint(command))]


def test_a_deployed_command_that_does_not_parse_is_found() -> None:
    (found,) = deployed_commands("spec: [{args: [serve, '${MODEL:-dummy:tiny-llama}', --prot=8000]}]")
    assert found[1] == "dummy:tiny-llama" and find_complaint(found)
