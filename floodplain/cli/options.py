"""Flags from dataclasses, their values from four sources, and the dataclasses built from these.

A field is a flag: ``max_num_seqs: int = 256`` is ``--max-num-seqs 256``. Its metadata may hold ``help``, ``choices``,
``metavar``, ``positional`` (no flag but an argument) and ``size`` (bytes, written ``256MiB``). A value comes from the
command line, else from the environment (``FLOODPLAIN_MAX_NUM_SEQS``), else from a file (``max_num_seqs: 256``), else it
is the default. Whatever the source, argparse reads it, so that checks and messages are the same.
"""

from __future__ import annotations

import argparse
import shlex
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from floodplain.cli.hints import hint_for, is_bundled
from floodplain.cli.sources import Source, dest_of, read_config_file, variable_of
from floodplain.core.errors import SettingRefused, UserError, flag_name
from floodplain.core.sizes import format_size, parse_size
from floodplain.files.similar import TYPO_SIMILARITY, did_you_mean

C = TypeVar("C")

COMMON_FLAGS = "common flags"
"""The title of the group of flags that every verb has."""

_UNSET = object()
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UserError. ``rest`` names what follows ``--``: flags of ``rest_owner``."""

    rest: str | None = None
    rest_owner = ""

    def error(self, message: str) -> Any:
        """Raise what argparse would print."""
        raise UserError(message)


def add_verb(verbs: Any, name: str, description: str, *flags: type[Any] | tuple[type[Any], str]) -> Parser:
    """Add a verb, or a verb of a verb; ``verbs``: from ``add_subparsers``.

    It has the flags that all verbs have, and those of dataclasses (``add_dataclass_flags``), alone or with a title.
    """
    parser: Parser = verbs.add_parser(name, description=description, allow_abbrev=False)
    common = parser.add_argument_group(COMMON_FLAGS)
    common.add_argument("--config", metavar="FILE", help="YAML file with values for these flags")
    common.add_argument("--format", choices=("terminal", "json"), default="terminal", help="how results are printed")
    common.add_argument("-q", "--quiet", action="store_true", help="print results and errors only")
    for each in flags:
        add_dataclass_flags(parser, *(each if isinstance(each, tuple) else (each,)))
    return parser


def add_dataclass_flags(parser: argparse.ArgumentParser, cls: type[Any], title: str | None = None) -> None:
    """Add a flag for every field of ``cls``, in a group of its own if there is a ``title``.

    A flag that the parser already has, with the same default, is shared (``--seed`` of an engine and a workload).
    """
    container = parser.add_argument_group(title) if title else parser
    hints = get_type_hints(cls)
    there = {action.dest: action.default for action in parser._actions}
    for item in fields(cls):
        if item.name not in there or there[item.name] != item.default:
            _add_flag(container, item, hints[item.name])


def dataclass_from(args: argparse.Namespace, cls: type[C]) -> C:
    """The dataclass with the values of the parsed flags. Raises UserError if it refuses a value."""
    values = {item.name: getattr(args, item.name) for item in fields(cls)}  # type: ignore[arg-type]
    try:
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    except SettingRefused as error:
        raise error.as_flags() from None


def resolve(parser: argparse.ArgumentParser, argv: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
    """The value of every flag of ``parser``, from the command line, the environment, a file, or its default.

    ``sources`` of the result has a ``Source`` for each value of the middle two. Raises UserError, which says where, if
    a value is malformed, a key is unknown, or a required one is missing.
    """
    rest = getattr(parser, "rest", None)
    num_own = argv.index("--") if rest and "--" in argv else len(argv)
    values = _resolve_own(parser, argv[:num_own], environ)
    if rest:
        setattr(values, rest, list(argv[num_own + 1 :]))
    return values


def _resolve_own(
    parser: argparse.ArgumentParser, argv: Sequence[str], environ: Mapping[str, str]
) -> argparse.Namespace:
    actions = {a.dest: a for a in parser._actions if a.default is not argparse.SUPPRESS}
    required = [action for action in actions.values() if action.required]
    for action in required:  # another source may set it
        action.required = False
    bundled = [token for token in argv if is_bundled(token)]
    typed, unknown = ({}, bundled) if bundled else _given(parser, actions, _without_model_flag(actions, argv))
    if unknown:
        if not unknown[0].startswith("-"):  # argparse takes no word of an argument that has too few
            _require(parser, [action for action in required if not action.option_strings], typed)
        known = {option for action in actions.values() for option in action.option_strings}
        wrong = unknown[0].partition("=")[0]  # the value may be a secret
        where = _where_rest_goes(parser, wrong)
        hint = did_you_mean(wrong, known, TYPO_SIMILARITY) + where if where else hint_for(wrong, known)
        raise UserError(f"unknown argument {wrong}{hint}")
    from_environment = _from_environment(parser, actions, environ)
    path = typed.get("config", from_environment.get("config"))
    from_file = _from_file(parser, actions, Path(path)) if path else {}
    values = from_file | from_environment | typed
    _require(parser, required, values)
    names = dict.fromkeys(from_file, str(path)) | {dest: variable_of(dest) for dest in from_environment}
    sources = [
        Source(name, _names_of(actions[dest]), str(values[dest])) for dest, name in names.items() if dest not in typed
    ]
    resolved = {dest: values.get(dest, action.default) for dest, action in actions.items()}
    return argparse.Namespace(**resolved, sources=sources)


def _require(parser: argparse.ArgumentParser, actions: Iterable[argparse.Action], values: Mapping[str, Any]) -> None:
    for action in actions:
        if action.dest not in values:
            raise UserError(f"{parser.prog} needs {'/'.join(_names_of(action))}: {action.help}")


def _without_model_flag(actions: Mapping[str, argparse.Action], argv: Sequence[str]) -> list[str]:
    """Arguments whose ``--model NAME``, which people know from other servers, is the argument MODEL."""
    tokens = [part for token in argv for part in (token.split("=", 1) if token.startswith("--model=") else (token,))]
    action = actions.get("model")
    if action is None or action.option_strings or "--model" not in tokens[:-1]:
        return list(argv)
    at = tokens.index("--model")
    if tokens[at + 1].startswith("-"):
        return list(argv)
    return [tokens[at + 1], *tokens[:at], *tokens[at + 2 :]]


def _given(
    parser: argparse.ArgumentParser, actions: Iterable[str], tokens: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """(values that ``tokens`` set, unknown tokens). argparse keeps attributes that are set beforehand."""
    namespace, unknown = parser.parse_known_args(tokens, argparse.Namespace(**dict.fromkeys(actions, _UNSET)))
    return {dest: value for dest, value in vars(namespace).items() if value is not _UNSET}, unknown


def _from_environment(
    parser: argparse.ArgumentParser, actions: Mapping[str, argparse.Action], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Values of non-empty variables such as ``FLOODPLAIN_PORT``, for flags of this verb only."""
    values: dict[str, Any] = {}
    for dest, action in actions.items():
        name = variable_of(dest)
        if environ.get(name):
            values |= _read(parser, actions, dest, _value_of(action, environ[name], name), name)
    return values


def _value_of(action: argparse.Action, text: str, name: str) -> Any:
    if action.nargs != "+":
        return text
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None


def _from_file(parser: argparse.ArgumentParser, actions: Mapping[str, argparse.Action], path: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in read_config_file(path).items():
        dest = dest_of(key)
        if dest not in actions or dest == "config":
            known = [name for name in actions if name != "config"]
            raise UserError(f"{path}: unknown key {key!r}{did_you_mean(dest, known)}")
        if value is not None:
            values |= _read(parser, actions, dest, value, f"{path}, {key}")
    return values


def _read(
    parser: argparse.ArgumentParser, actions: Mapping[str, argparse.Action], dest: str, value: Any, source: str
) -> dict[str, Any]:
    """The value of flag ``dest``, parsed as if ``value`` were on the command line."""
    action = actions[dest]
    if _is_switch(action):
        word = _WORDS.get(value.lower(), value) if isinstance(value, str) else value
        if not isinstance(word, bool):
            raise UserError(f"{source}: write true or false, not {value!r}")
        return {dest: word}
    if isinstance(value, bool):
        value = str(value).lower()  # as it is written there
    if isinstance(value, dict) or (isinstance(value, list) and action.nargs != "+"):
        raise UserError(f"{source}: {value} is not one value")
    if isinstance(value, list):
        words = [str(word) for word in value]
        if flag := next((word for word in words if word.startswith("-")), None):
            raise UserError(f"{source}: {flag} looks like a flag, and only values may stand here")
        tokens = [*action.option_strings[:1], *words]
    elif action.option_strings:
        tokens = [f"{action.option_strings[-1]}={value}"]
    else:
        tokens = ["--", str(value)]
    try:
        return _given(parser, actions, tokens)[0]
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def _names_of(action: argparse.Action) -> tuple[str, ...]:
    number = action.nargs if isinstance(action.nargs, int) else 1
    return tuple(action.option_strings) or (" ".join([str(action.metavar or action.dest)] * number),)


def _is_switch(action: argparse.Action) -> bool:
    return action.nargs == 0


def _where_rest_goes(parser: argparse.ArgumentParser, name: str) -> str:
    owner: str = getattr(parser, "rest_owner", "") if name.startswith("-") else ""
    return f": flags of {owner} follow --, as in {parser.prog} MODEL -- {name} VALUE" if owner else ""


def _add_flag(container: Any, item: Field[Any], hint: Any) -> None:
    kind, is_list = _kind(hint)
    is_required = item.default is MISSING and item.default_factory is MISSING
    default = None if is_required else item.default if item.default_factory is MISSING else item.default_factory()
    options: dict[str, Any] = {"help": _help(item, default), "default": default}
    if kind is bool:
        container.add_argument(flag_name(item.name), action=argparse.BooleanOptionalAction, **options)
        return
    options |= {
        "type": _converter(parse_size) if item.metadata.get("size") else kind,
        "choices": item.metadata.get("choices"),
        "metavar": item.metadata.get("metavar") or _metavar(item, kind),
        "nargs": "+" if is_list else None,
    }
    if item.metadata.get("positional"):
        container.add_argument(item.name, **options | ({} if is_required else {"nargs": "?"}))
    else:
        container.add_argument(flag_name(item.name), required=is_required, **options)


def _kind(hint: Any) -> tuple[Callable[[str], Any], bool]:
    """(type of one value, whether there are several) of ``X``, ``X | None``, ``tuple[X, ...]``."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (member for member in get_args(hint) if member is not types.NoneType)
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True
    return hint, False


def _metavar(item: Field[Any], kind: Callable[[str], Any]) -> str | None:
    if item.metadata.get("choices"):
        return None
    if item.metadata.get("size"):
        return "SIZE"
    if item.metadata.get("positional"):
        return item.name.upper()
    names: dict[Any, str] = {int: "N", float: "X", Path: "FILE"}
    return names.get(kind, "TEXT")


def _help(item: Field[Any], default: Any) -> str:
    text: str = item.metadata.get("help", "")
    if default is None or default == () or "(default" in text:
        return text
    if isinstance(default, bool):
        shown = "on" if default else "off"
    else:
        shown = format_size(default) if item.metadata.get("size") else str(default)
    return f"{text} (default: {shown})".lstrip()


def _converter(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """``parse`` with its errors as ``ArgumentTypeError``, for which argparse names the flag."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
