from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.cli.main import _find_flags
from floodplain.cli.sources import NO_FLAGS, PREFIX, check_variables, variable_of
from floodplain.core.errors import UserError
from floodplain.memory.native import build
from floodplain.model.attention import paged_prefill
from tests.support.refusals import Refuse

FLAGS = _find_flags()
KNOWN = {*map(variable_of, FLAGS), *NO_FLAGS}


def check(**environ: str) -> None:
    check_variables(environ, lambda: FLAGS)


def test_variables_of_every_verb_and_of_no_flag_are_known() -> None:
    for name in ("MODEL", "PORT", "CONFIG", "TTL", "BASE_URL", "TRACE", "QUICK", "WATCH", "DEVICE_NAME"):
        assert PREFIX + name in KNOWN
    assert {build.DISABLE_VARIABLE, paged_prefill.DISABLE_VARIABLE} < KNOWN
    check(**dict.fromkeys(KNOWN, "x"), HOME="/", FLOODPLAINS="1", FLOODPLAIN="1", FLOODPLAIN_UNKNOWN="")


@given(name=st.text(st.sampled_from("ABCPORTportMDEL_019"), max_size=12))
def test_a_variable_that_nothing_reads_is_refused_by_name(name: str) -> None:
    variable = PREFIX + name
    if variable in KNOWN:
        check(**{variable: "1"})
        return
    with pytest.raises(UserError, match=f"^unknown variable {variable}: ") as caught:
        check(**{variable: "1"})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("FLOODPLAIN_POLICI", "cfs", r"did you mean FLOODPLAIN_POLICY\?"),
        ("FLOODPLAIN_port", "1", r"did you mean FLOODPLAIN_PORT\?"),
        ("floodplain_kv_memory", "1", r"did you mean FLOODPLAIN_KV_MEMORY\?"),
        ("FLOODPLAIN_PORT_", "1", r"did you mean FLOODPLAIN_PORT\?"),
        ("FLOODPLAIN_", "1", "unset it"),
        ("FLOODPLAIN_XQZ", "1", "unset it"),
        ("FLOODPLAIN_PORT", "tcp://10.0.0.1:80", "enableServiceLinks"),
        ("FLOODPLAIN_SERVICE_HOST", "10.0.0.1", "enableServiceLinks"),
        ("FLOODPLAIN_PORT_8000_TCP_ADDR", "10.0.0.1", "enableServiceLinks"),
    ],
)
def test_an_unknown_variable_names_the_likely_cause(name: str, value: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^unknown variable {name}: .*{message}"):
        check(**{name: value})


@pytest.mark.parametrize(
    ("variables", "words", "message"),
    [
        ({"PORT": "99999"}, ["serve", "m"], "--port must be between 0 and 65535, not 99999 (--port is set by {}PORT)"),
        ({"API_KEY_FILE": "/no-such"}, ["serve", "m"], "(--api-key-file is set by {}API_KEY_FILE)"),
        ({"MODEL": "/no-such"}, ["serve"], "(MODEL is set by {}MODEL)"),
        ({"KEEP_ALIVE_TIMEOUT": "0"}, ["serve", "m"], "--keep-alive-timeout is set by {}KEEP_ALIVE_TIMEOUT)"),
        ({"PING_INTERVAL": "nan"}, ["serve", "m"], "--ping-interval is set by {}PING_INTERVAL)"),
        ({"SHARE_PREFIXES": "1"}, ["serve", "m"], "--share-prefixes is set by {}SHARE_PREFIXES)"),
        ({"RATE": "1"}, ["leases", "--interval", "0"], "unknown variable {}RATE"),
        ({"INTERVAL": "0"}, ["leases", "--interval", "-1"], "between 0.1 and 3600 seconds, not -1.0\n"),
    ],
)
def test_a_refused_value_of_a_variable_names_the_variable(
    variables: dict[str, str], words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, refuse: Refuse
) -> None:
    for name, value in ({"PORT": "0"} | variables).items():  # not the default one: it may be taken here
        monkeypatch.setenv(PREFIX + name, value)
    assert message.format(PREFIX) in f"{refuse(*words)}\n"


def test_a_refused_value_of_a_file_names_the_file(tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / "c.yaml").write_text("port: 99999\n")
    told = refuse("serve", "m", "--config", str(tmp_path / "c.yaml"))
    assert told.endswith(f"(--port is set by {tmp_path / 'c.yaml'})")


def test_every_verb_refuses_an_unknown_variable(monkeypatch: pytest.MonkeyPatch, refuse: Refuse) -> None:
    monkeypatch.setenv("FLOODPLAIN_KV_MEMROY", "1GiB")
    told = ["vllm", "serve", "m", "--", "--help"]  # another program's help is not ours
    for words in (["doctor"], ["coordinator"], ["leases"], ["bench", "serve", "--model", "m"], ["serve", "m"], told):
        assert refuse(*words) == "unknown variable FLOODPLAIN_KV_MEMROY: did you mean FLOODPLAIN_KV_MEMORY?"
