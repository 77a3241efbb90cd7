"""Mistyped words and flags of other servers: the message says what to write."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from floodplain import __version__
from floodplain.cli.hints import OTHER_FLAGS
from floodplain.cli.main import VERBS, _build, _verbs_of
from floodplain.files.similar import nearest
from tests.support.refusals import Refuse

SERVE = set(_verbs_of(_build(["serve"]))["serve"]._option_string_actions)


def test_letters_in_another_order_are_nearer_than_more_common_ones() -> None:
    assert nearest("PROT", ["PROMPT", "PORT", "PROFILE"]) == "PORT"
    assert nearest("polcy", ["policy", "slice"]) == "policy"
    assert nearest("xqz", ["policy", "slice"]) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serv"], "unknown verb 'serv' (did you mean serve?)"),
        (["bench", "offlien", "m"], "unknown verb 'offlien' (did you mean offline?)"),
        (["xqz"], "floodplain needs one of: demo, serve, "),
        (["--prot", "80", "serve", "m"], "unknown argument --prot: flags follow the verb, one of demo, serve, "),
        (["--verson"], "unknown argument --verson (did you mean --version?)"),
        (["serve", "m", "--prot", "80"], "unknown argument --prot (did you mean --port?)"),
        (["serve", "--model", "--port", "80"], "unknown argument --model: its value is missing"),
        (["serve", "m", "--tensor-parallel-size=2"], "--instances N --pipeline divides the layers"),
        (["serve", "m", "--gpu-memory-utilization", "0.9"], "--kv-memory SIZE, by default 90%"),
        (["bench", "offline", "m", "--block-size", "16"], "unknown argument --block-size: write --block-tokens N"),
        (["bench", "offline", "m", "--data-parallel-size", "2"], "unknown argument --data-parallel-size\n"),
        (["serve", "m", "--tensor_parallel_size=2"], "--instances N --pipeline divides the layers"),
        (["serve", "m", "--max_num_seqs", "2"], "unknown argument --max_num_seqs (did you mean --max-num-seqs?)"),
        (["serve", "m", "-V"], "unknown argument -V\n"),
        (["serve", "m", "--uvicorn-log-level", "info"], "unknown argument --uvicorn-log-level\n"),
        (["coordinator", "-hf", "org/model"], "unknown argument -hf\n"),
        (["serve", "smollm2", "-hfr", "org/model"], "unknown argument -hfr"),
        (["coordinator", "--trust-remote-code"], "unknown argument --trust-remote-code\n"),
        (["serve", "m", "--kv-memory", "48M"], "'48M' is no size: write 48MiB, 48MB, or bytes"),
        (["serve", "m", "--kv-memory", "48Mi"], "'48Mi' is no size: write 48MiB, or bytes"),
    ],
)
def test_a_wrong_word_is_answered_by_the_right_one(words: list[str], message: str, refuse: Refuse) -> None:
    assert message in f"{refuse(*words)}\n"


def test_hints_name_flags_that_serve_has_for_flags_that_it_has_not() -> None:
    for flag, told in OTHER_FLAGS.items():
        assert flag not in SERVE
        assert set(re.findall(r"--[a-z-]+", told)) <= SERVE, flag


@pytest.mark.parametrize("flag", sorted(OTHER_FLAGS))
def test_every_flag_of_another_server_gets_its_hint(flag: str, refuse: Refuse) -> None:
    words = ["serve", flag] if flag == "--model" else ["serve", "m", flag]
    assert refuse(*words) == f"unknown argument {flag}: {OTHER_FLAGS[flag]}"


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_the_module_is_the_command(flag: str) -> None:
    done = subprocess.run([sys.executable, "-m", "floodplain", flag], capture_output=True, text=True, check=True)
    assert done.stdout == f"floodplain {__version__}\n"


def test_every_verb_is_its_own_nearest() -> None:
    assert [nearest(verb, VERBS) for verb in VERBS] == list(VERBS)
