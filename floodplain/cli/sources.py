"""Sources of flags beside the command line: variables and a file. Errors about a flag name its source."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from floodplain.core.errors import UserError
from floodplain.files.similar import nearest
from floodplain.files.yaml_file import read_yaml_mapping

PREFIX = "FLOODPLAIN_"
NO_FLAGS = ("FLOODPLAIN_NO_FLASHINFER", "FLOODPLAIN_NO_NATIVE_KERNELS", "FLOODPLAIN_SHARED", "FLOODPLAIN_BIN")
"""Known variables that are not flags: two switches, the tests' data, and the binary that scripts use."""
_KUBERNETES = re.compile(r"FLOODPLAIN_(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")


def variable_of(flag: str) -> str:
    """The variable that sets a flag, such as ``max_num_seqs``."""
    return PREFIX + flag.upper()


def check_variables(environ: Mapping[str, str], find_flags: Callable[[], Iterable[str]]) -> None:
    """Raise UserError for a variable that no verb reads, with the most similar known name; an empty one is unset."""
    named = sorted(name for name, value in environ.items() if value and name.upper().startswith(PREFIX))
    if not named:
        return
    known = {*map(variable_of, find_flags()), *NO_FLAGS}
    for name in named:
        if _KUBERNETES.fullmatch(name) and _is_of_service(name, environ[name]):
            raise UserError(
                f"unknown variable {name}: Kubernetes sets it for a service called floodplain; "
                "give the pod enableServiceLinks: false, or the service another name"
            )
        if name not in known:
            raise UserError(f"unknown variable {name}: {_hint(name, known)}")


def _hint(name: str, known: Iterable[str]) -> str:
    ends = [each.removeprefix(PREFIX) for each in sorted(known)]  # all have the same prefix
    near = nearest(name.upper().removeprefix(PREFIX), ends)
    return f"did you mean {PREFIX}{near}?" if near else "unset it"


def _is_of_service(name: str, value: str) -> bool:
    return "SERVICE" in name or "://" in value or bool(re.search(r"_\d+_", name))


_LEAST_LETTERS = 3
"""Shorter values may be in a message by chance."""


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a flag's value, if not the command line.

    ``options``: the spellings of the flag, or the name of the argument.
    """

    name: str
    options: tuple[str, ...]
    value: str

    def is_flag_in(self, message: str) -> bool:
        """Whether a message names the flag."""
        return any(re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", message) for option in self.options)

    def is_value_in(self, message: str) -> bool:
        """Whether a message quotes the value."""
        return len(self.value) >= _LEAST_LETTERS and self.value in message


def name_sources(error: UserError, sources: Iterable[Source]) -> UserError:
    """``error`` with the sources of the flags that it names, or else of the values that it quotes."""
    message, known = str(error), list(sources)
    meant = [one for one in known if one.is_flag_in(message)] or [one for one in known if one.is_value_in(message)]
    told = ", ".join(f"{one.options[0]} is set by {one.name}" for one in meant)
    return UserError(f"{message} ({told})") if told else error


MAX_CONFIG_BYTES = 2**16
MAX_DEPTH = 4
"""Levels that are parsed: a mapping, a list in it, and room for an error about deeper nesting."""


def read_config_file(path: Path) -> dict[Any, Any]:
    """The mapping in a YAML file, numbers as their text (``1.10`` is not ``1.1``). Raises UserError as it is parsed."""
    return read_yaml_mapping(path, MAX_CONFIG_BYTES, MAX_DEPTH, "--config", same=dest_of, number=lambda text, _: text)


def dest_of(key: str) -> str:
    """The flag of a key, which may be written with ``-`` or with ``_``."""
    return key.replace("-", "_")
