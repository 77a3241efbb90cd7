"""``floodplain vllm serve``: the command that it becomes, and what it refuses before."""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from typing import Any

import pytest

from floodplain.cli import main as cli
from floodplain.cli.vllm import VllmConfig, build_command
from floodplain.core.errors import UserError


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the process became, with a vLLM that was tried."""
    became: list[list[str]] = []
    monkeypatch.setattr(metadata, "version", lambda name: "0.32.1")
    monkeypatch.setattr(os, "execv", lambda path, argv: became.append(argv) or sys.exit(0))
    return became


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def extra_of(command: list[str]) -> dict[str, Any]:
    extra: dict[str, Any] = json.loads(value_of(command, "--kv-transfer-config"))["kv_connector_extra_config"]
    return extra


def test_it_becomes_vllms_server_with_ours_in_it(become: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        flags = ["--policy", "cfs", "--slice", "5", "--swap-memory", "1GiB", "--", "--port", "9"]
        cli.main(["vllm", "serve", "some/model", *flags])
    (command,) = become
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert value_of(command, "--model") == "some/model"
    assert value_of(command, "--scheduler-cls") == "floodplain.plugins.vllm.scheduler.FloodplainScheduler"
    assert extra_of(command) == {"policy": "cfs", "slice": 5, "swap_memory": 2**30}
    assert command[-2:] == ["--port", "9"] and "--no-async-scheduling" in command
    assert "--scheduler-cls floodplain.plugins.vllm" in capsys.readouterr().out


def test_flags_of_vllm_are_left_as_they_are() -> None:
    flags = ["--policy", "not-ours", "--", "--help"]
    assert build_command(VllmConfig(model="m"), flags)[-4:] == flags


@pytest.mark.parametrize("flag", ["--scheduler-cls", "--kv-transfer-config={}", "--async-scheduling", "--model=x"])
def test_flags_that_are_set_here_are_refused(flag: str) -> None:
    with pytest.raises(UserError, match=f"^{flag} is set by floodplain: leave it out"):
        build_command(VllmConfig(model="m"), ["--port", "9", flag])


@pytest.mark.parametrize(
    ("version", "argv", "message"),
    [
        ("0.31.0", [], "vLLM 0.31.0 was not tested"),
        (None, [], "vLLM is not installed: pip install vllm"),
        ("0.32.0", ["--slice", "0"], "--slice must be between 1 and 10000 steps, not 0"),
        ("0.32.0", ["--port", "9"], "unknown argument --port"),
    ],
)
def test_bad_usage_is_one_line(
    version: str | None,
    argv: list[str],
    message: str,
    become: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def find(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", find)
    assert cli.main(["vllm", "serve", "m", *argv]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not become


def test_a_version_that_nobody_tried_is_let_in_on_demand(
    become: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.99.0")
    with pytest.raises(SystemExit):
        cli.main(["vllm", "serve", "m", "--allow-untested"])
    assert extra_of(become[0])["allow_untested"] is True
