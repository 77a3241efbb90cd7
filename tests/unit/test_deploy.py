"""The files of deploy/: every command that they start is one that there is."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.support.command_lines import find_complaint, parsers

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
GUIDE = (ROOT / "docs" / "how-to" / "deploy.md").read_text()


def container_commands(source: str) -> list[list[str]]:
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


def unit_commands(source: str) -> list[list[str]]:
    """Commands of floodplain that a unit of systemd runs."""
    return [shlex.split(line) for line in re.findall(r"^Exec\w+=\S*/floodplain (.+)$", source, re.MULTILINE)]


def image_command(source: str) -> tuple[list[str], list[str]]:
    """(entry point, default arguments) of a Dockerfile's image."""
    (entry,), (default,) = (re.findall(rf"^{key} (\[.*\])$", source, re.MULTILINE) for key in ("ENTRYPOINT", "CMD"))
    return json.loads(entry), json.loads(default)


def docker_commands(source: str) -> list[tuple[str, list[str]]]:
    """(image, its arguments) of every ``docker run`` of a page."""
    runs = re.findall(r"\bdocker run ([^`]+?)[`\n]", source.replace("\\\n", " "))
    words = [shlex.split(run) for run in runs]
    places = [next(at for at, word in enumerate(run) if re.fullmatch(r"floodplain(:\w+)?", word)) for run in words]
    return [(run[at], run[at + 1 :]) for run, at in zip(words, places, strict=True)]


def test_every_command_of_a_container_parses() -> None:
    files = [path for path in DEPLOY.rglob("*.yaml") if path.name[0] != "."]
    commands = [(path.name, command) for path in files for command in container_commands(path.read_text())]
    assert sorted(name for name, _ in commands) == sorted(
        ["compose.yaml"] * 3 + ["coordinator.yaml", "group.yaml", "group.yaml", "server.yaml"]
    )
    assert not [(name, command, wrong) for name, command in commands if (wrong := find_complaint(command))]


def test_a_command_of_a_container_that_does_not_parse_is_found() -> None:
    (found,) = container_commands("spec: [{args: [serve, '${MODEL:-dummy:tiny-llama}', --prot=8000]}]")
    assert found[1] == "dummy:tiny-llama" and find_complaint(found)


@pytest.mark.parametrize(
    ("unit", "config", "settings"),
    [
        ("floodplain-coordinator.service", "/etc/floodplain/coordinator.yaml", "port: 8100\n"),
        ("floodplain@.service", "/etc/floodplain/%i.yaml", "".join(re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL))),
    ],
)
def test_a_unit_parses_with_the_settings_of_the_guide(unit: str, config: str, settings: str, tmp_path: Path) -> None:
    (command,) = unit_commands((DEPLOY / "systemd" / unit).read_text())
    assert command[-2:] == ["--config", config]
    own = tmp_path / "own.yaml"
    own.write_text(settings)
    assert find_complaint([*command[:-1], str(own)]) == ""
    own.write_text(f"{settings}prot: 8000\n")
    assert find_complaint([*command[:-1], str(own)])


def test_a_unit_that_does_not_parse_is_found() -> None:
    (found,) = unit_commands("[Service]\nExecStart=/opt/floodplain/bin/floodplain serve --confg a.yaml\n")
    assert find_complaint(found)


def test_every_image_and_every_docker_run_of_the_guide_parses() -> None:
    sources = {"floodplain": "Dockerfile", "floodplain:cuda": "Dockerfile.cuda", "floodplain:vllm": "Dockerfile.vllm"}
    images = {name: image_command((DEPLOY / file).read_text()) for name, file in sources.items()}
    runs = [*((name, default) for name, (_, default) in images.items()), *docker_commands(GUIDE)]
    assert {name for name, _ in runs[len(images) :]} == set(images)
    for name, arguments in runs:
        program, *verb = images[name][0]
        assert (program, find_complaint([*verb, *arguments])) == ("floodplain", ""), name


def test_a_docker_run_that_does_not_parse_is_found() -> None:
    (found,) = docker_commands("```\ndocker run -p 1:1 \\\n    floodplain serve m --prot 1\n```")
    assert found[0] == "floodplain" and find_complaint(found[1])
