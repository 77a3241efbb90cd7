from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest

from floodplain import __version__
from floodplain.cli import main as cli
from floodplain.cli.options import add_verb
from floodplain.core.errors import InvariantError, UserError, WriteFailed
from floodplain.observe.terminal import LineFormatter
from tests.support.refusals import Refuse


@pytest.fixture
def toy_verb(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Installs a verb ``demo`` with a nested verb; yields the arguments of its runs."""
    module = types.ModuleType("floodplain.cli.demo")
    seen: list[object] = []

    def add_parser(verbs: object) -> None:
        inner = verbs.add_parser("demo", description="toy").add_subparsers(dest="inner")  # type: ignore[attr-defined]
        add_verb(inner, "quick", "toy").add_argument(
            "--how", default="well", choices=("well", "badly", "user", "full", "stop")
        )

    def run(args: object) -> int:
        seen.append(args)
        outcome = {"user": UserError("change\nthis"), "full": WriteFailed("full"), "stop": KeyboardInterrupt()}.get(
            args.how
        )  # type: ignore[attr-defined]
        if outcome:
            raise outcome
        return int(args.how == "badly")  # type: ignore[attr-defined]

    module.add_parser, module.run = add_parser, run  # type: ignore[attr-defined]
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "floodplain.cli.demo", module)
    yield seen


@pytest.mark.parametrize(("how", "status"), [("well", 0), ("badly", 1), ("full", 1), ("user", 2), ("stop", 130)])
def test_how_a_verb_ends_is_the_exit_status(
    how: str, status: int, toy_verb: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", "quick", "--how", how]) == status
    assert len(toy_verb) == 1
    said = {"user": "floodplain: change this\n", "full": "floodplain: full\n"}
    assert capsys.readouterr().err == said.get(how, "")


def test_an_error_cannot_control_the_terminal_nor_fill_it(refuse: Refuse) -> None:
    line = refuse("serve", "m", f"--\x1b[2J\u202e{'x' * 5000}")
    assert "\\u001b[2J\\u202exxx" in line
    assert line.isprintable() and len(line) < 1100


def test_a_verb_learns_what_was_typed(toy_verb: list[types.SimpleNamespace]) -> None:
    cli.main(["demo", "quick", "-q"])
    assert (toy_verb[0].verb, toy_verb[0].quiet, toy_verb[0].format) == ("demo quick", True, "terminal")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["demo"], "floodplain demo needs one of: quick"),
        (["serve"], "floodplain serve needs MODEL"),
        (["cluster", "migrate"], "floodplain cluster migrate needs INSTANCE INSTANCE: "),
        (["cluster", "migrate", "0"], "floodplain cluster migrate needs INSTANCE INSTANCE: "),
        (["cluster", "migrate", "0", "1", "2"], "unknown argument 2"),
        (["serve", "m", "--port", "99999"], "--port must be between 0 and 65535, not 99999"),
        (["serve", "m", "--host", "0.0.0.0"], "--host 0.0.0.0 lets other machines in: give --api-key-file"),
        (["serve", "m", "--api-key-file", "/nonexistent"], "cannot read the API key file /nonexistent"),
        (["serve", "m", "--fair-by", "key"], "--fair-by key needs --api-key-file"),
        (["bench", "offline", "m", "--fair-by", "key"], "--fair-by key needs clients with keys, and bench offline has"),
        (["profile", "llm", "m", "--fair-by", "key"], "--fair-by key needs clients with keys, and profile llm has"),
        (
            ["profile", "swap", "m", "--fair-by=key", "--step-line", "1", "1", "1", "--kv-memory=1GiB"],
            "--fair-by key needs clients with keys, and profile swap has",
        ),
        (
            ["profile", "step", "m", "--fair-by", "key", "--out", "s.json"],
            "--fair-by key needs clients with keys, and profile step has",
        ),
    ],
)
def test_bad_usage_is_status_2_and_one_line(
    argv: list[str], message: str, toy_verb: list[object], refuse: Refuse
) -> None:
    assert message in refuse(*argv)
    assert toy_verb == []


def test_a_bug_of_ours_is_not_caught(toy_verb: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> int:
        raise InvariantError("a block is twice free")

    monkeypatch.setattr(sys.modules["floodplain.cli.demo"], "run", fail)
    with pytest.raises(InvariantError):
        cli.main(["demo", "quick"])


@pytest.mark.parametrize(("told", "policy"), [(None, "passive"), ("active", "active")])
def test_threads_wait_without_spinning_unless_configured_otherwise(
    told: str | None, policy: str, toy_verb: list[types.SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", told or "")
    if told is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    cli.main(["demo", "quick"])
    assert os.environ["OMP_WAIT_POLICY"] == policy


def test_without_a_verb_the_verbs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "serve a model" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["--version"]])
@pytest.mark.parametrize("variable", ["FLOODPLAIN_SHARED", "FLOODPLAIN_MODEL", "FLOODPLAIN_UNKNOWN"])
def test_help_loads_nothing_heavy(argv: list[str], variable: str) -> None:
    """Checks the imports of a fresh interpreter: they make start-up slow."""
    program = (
        "import sys; from floodplain.cli.main import main\n"
        f"try: main({argv!r})\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'numpy', 'fastapi', 'pydantic', 'uvicorn', 'transformers', 'yaml', 'matplotlib'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    environ = os.environ | {variable: "x"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    assert ("serve" if "--help" in argv else __version__) in done.stdout


def test_a_library_s_own_handler_gets_no_control_character() -> None:
    program = (
        "import logging; from floodplain.observe.terminal import start_logging; start_logging(False)\n"
        "logger = logging.getLogger('library'); logger.propagate = False; logger.addHandler(logging.StreamHandler())\n"
        "logger.warning('a model of type %s\\nis new', 'x\\x1b[2J')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "a model of type x\\u001b[2J\nis new\n"


def test_a_log_entry_is_one_line_that_no_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logger = logging.Logger("someone")
    logger.addHandler(handler)
    logger.warning("request %s", "r1\x1b]0;x\x07\n2026 INFO root: all is well\u202e")
    try:
        raise ValueError("a\x9b2J")
    except ValueError:
        logger.exception("failed")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith(r"request r1\u001b]0;x\u0007\u000a2026 INFO root: all is well\u202e")
    assert (lines[1][-6:], lines[2][:9], lines[-1]) == ("failed", "Traceback", r"ValueError: a\u009b2J")
