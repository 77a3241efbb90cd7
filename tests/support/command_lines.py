"""Errors of the command line for commands that a page or a file of deploy/ shows; no command is run."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache

from floodplain.cli.main import list_parsers
from floodplain.cli.options import Parser, resolve
from floodplain.core.errors import UserError

parsers = cache(list_parsers)


def _find_leaf(arguments: Sequence[str]) -> tuple[Parser | None, Sequence[str]]:
    """The parser of the longest verb that the arguments begin with, and the rest."""
    for length in (2, 1):
        if parser := parsers().get(" ".join(arguments[:length])):
            return parser, arguments[length:]
    return None, arguments


def find_complaint(arguments: Sequence[str]) -> str:
    """The error of the command line for a whole command; empty if it has none."""
    parser, rest = _find_leaf(arguments)
    if parser is None:
        return "" if arguments[0] in ("--help", "--version", "-V", "--print-completion") else f"no verb {arguments[0]}"
    if "--help" in rest or "-h" in rest:
        return ""
    try:
        resolve(deepcopy(parser), list(rest), {})  # it changes the parser
    except UserError as error:
        return str(error)
    return ""


def find_unknown(arguments: Sequence[str]) -> list[str]:
    """The verbs and flags of a mention that do not exist."""
    words = [word.split("|")[0] for word in arguments]
    parser, rest = _find_leaf(words)
    if parser is None:
        return [] if words[0].startswith("-") or words[0].isupper() else [words[0]]
    known = {option for action in parser._actions for option in action.option_strings}
    own = rest[: rest.index("--")] if "--" in rest else rest
    return [word for word in own if word.startswith("--") and word.partition("=")[0] not in known]
