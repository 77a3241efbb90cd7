"""The ``floodplain`` command: finds the verb, runs it, and returns its exit status."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from floodplain import __version__
from floodplain.cli.options import Parser, resolve
from floodplain.cli.sources import check_variables, name_sources
from floodplain.core.errors import ServiceLost, UserError, WriteFailed
from floodplain.files.extras import missing
from floodplain.files.results import open_standard_streams
from floodplain.files.similar import TYPO_SIMILARITY, did_you_mean
from floodplain.observe.terminal import complain, say, start_logging

VERBS = {
    "demo": "serve a burst in three ways and show who waits for what",
    "serve": "serve a model over the OpenAI API",
    "instance": "one of many engines behind a router, which serve --instances is",
    "instances": "which instances are behind a router, and how they are",
    "top": "what a server or a coordinator does now, in a terminal",
    "cluster": "let instances behind a router drop layers, restore them, or move a request",
    "vllm": "serve a model by vLLM, with our scheduler and swap space in it",
    "bench": "measure an engine (offline) or any OpenAI server (serve)",
    "coordinator": "keep the leases of memory that engines lend each other",
    "profile": "what a model needs or can spare: its rate within goals, its memory, its steps",
    "simulate": "what a load would do to hardware that is not here, in virtual time",
    "reproduce": "which claims of the papers come out in virtual time, figure by figure",
    "place": "which model should be on which GPUs, and who may borrow from whom",
    "leases": "who lends what to whom",
    "doctor": "what is installed, measured, emulated and untested here",
}
"""Every verb, in the order of ``--help``. ``floodplain/cli/NAME.py`` has its ``add_parser(verbs)`` and ``run(args)``.

``run`` returns the exit status. ``args.verb`` is the verb as typed, such as ``bench serve``.
"""

SHELLS = ("bash", "zsh", "tcsh")
"""Those for which shtab makes completion scripts."""

DONE, FAILED, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0: done. 1: failed. 2: bad usage or bad input, with one line on stderr that says what to change. 130: interrupted.
    """
    open_standard_streams()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning torch threads stall beside other work
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        complain(str(error))
        return BAD_USAGE
    except (ServiceLost, WriteFailed) as error:
        complain(str(error))
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(argv: list[str]) -> int:
    parser = _build(argv[:1])
    if not argv:
        parser.print_help(sys.stderr)
        return BAD_USAGE
    leaf, words = _descend(parser, argv)
    if not _asks_for_help(argv):  # the flags of all verbs are many imports
        check_variables(os.environ, _find_flags)
    args = resolve(leaf, argv[len(words) :], os.environ)
    args.verb = " ".join(words)
    start_logging(args.quiet)
    try:
        status: int = _module_of(words[0]).run(args)
    except UserError as error:
        raise name_sources(error, args.sources) from error
    return status


def _asks_for_help(argv: Sequence[str]) -> bool:
    own = argv[: argv.index("--")] if "--" in argv else argv  # flags of another program may follow
    return "-h" in own or "--help" in own


class _PrintCompletion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: Any, flag: str | None = None) -> None:
        say(make_script(_build(VERBS), shell))
        parser.exit()


def _module_of(verb: str) -> Any:
    return importlib.import_module(f"floodplain.cli.{verb}")


def _build(whole: Collection[str]) -> Parser:
    """The parser. Only the verbs in ``whole`` are imported, and have their flags."""
    parser = Parser(prog="floodplain", description="Keeps LLM servers responsive when requests outgrow GPU memory.")
    parser.add_argument("-V", "--version", action="version", version=f"floodplain {__version__}")
    parser.add_argument(
        "--print-completion", action=_PrintCompletion, choices=SHELLS, help="print the completion script of a shell"
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for name in VERBS:
        if name in whole:
            _module_of(name).add_parser(verbs)
        else:
            verbs.add_parser(name, help=VERBS[name])
    return parser


def _descend(parser: Parser, argv: Sequence[str]) -> tuple[Parser, list[str]]:
    """The parser of the innermost verb (``bench serve``), and the words that name it."""
    words: list[str] = []
    while verbs := _verbs_of(parser):
        rest = argv[len(words) :]
        if not rest or rest[0] not in verbs:
            _end_before_verb(parser, list(verbs), rest)
        words.append(rest[0])
        parser = verbs[rest[0]]
    return parser, words


def _end_before_verb(parser: Parser, verbs: Sequence[str], rest: Sequence[str]) -> NoReturn:
    """Obey ``--help`` and the like, else raise UserError for a missing or unknown verb."""
    word = rest[0].partition("=")[0] if rest else ""
    if word in parser._option_string_actions:
        parser.parse_args(rest[: 1 + ("=" not in rest[0])])
    if word.startswith("-"):
        near = did_you_mean(word, parser._option_string_actions, TYPO_SIMILARITY)
        raise UserError(f"unknown argument {word}{near}: flags follow the verb, one of {', '.join(verbs)}")
    if near := did_you_mean(word, verbs):
        raise UserError(f"unknown verb {word!r}{near}")
    raise UserError(f"{parser.prog} needs one of: {', '.join(verbs)}" + (f", not {word!r}" if word else ""))


def list_parsers() -> dict[str, Parser]:
    """The parser of each verb by its words: ``bench``, ``bench serve``. Imports the modules of all verbs."""
    parsers: dict[str, Parser] = {}
    found: dict[str, Parser] = _verbs_of(_build(VERBS))
    while found:
        parsers |= found
        found = {f"{words} {verb}": leaf for words in found for verb, leaf in _verbs_of(found[words]).items()}
    return parsers


def _find_flags() -> set[str]:
    actions = [action for parser in list_parsers().values() for action in parser._actions]
    return {action.dest for action in actions if action.default is not argparse.SUPPRESS}


def _verbs_of(parser: Parser) -> dict[str, Any]:
    tables = [action.choices for action in parser._actions if action.nargs == "A..."]
    return dict(tables[0]) if tables and tables[0] else {}


def make_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script that completes the words of ``parser`` and its verbs in ``shell``. UserError without shtab."""
    try:
        import shtab
    except ImportError:
        raise missing("--print-completion", "shtab") from None
    _prepare(parser, {"FILE": shtab.FILE, "FOLDER": shtab.DIRECTORY, "MODEL": shtab.FILE})
    script: str = shtab.complete(parser, shell)
    return script


def _prepare(parser: argparse.ArgumentParser, kinds: dict[str, object]) -> None:
    """Have shtab complete paths, and verbs without a line of help, which it would leave out."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            listed = {choice.dest for choice in action._choices_actions}
            for name, verb in action.choices.items():
                if name not in listed:
                    action._choices_actions.append(action._ChoicesPseudoAction(name, (), verb.description or name))
                _prepare(verb, kinds)
        elif action.metavar in kinds:
            action.complete = kinds[action.metavar]  # type: ignore[attr-defined]
