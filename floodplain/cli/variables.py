"""``FLOODPLAIN_*`` variables: an unknown one is an error, in upper or lower case."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping

from floodplain.core.errors import UserError

PREFIX = "FLOODPLAIN_"
NO_FLAGS = ("FLOODPLAIN_NO_FLASHINFER", "FLOODPLAIN_NO_NATIVE_KERNELS", "FLOODPLAIN_SHARED", "FLOODPLAIN_BIN")
"""Known variables that are not flags: two switches, the tests' data, and the binary that scripts use."""
_KUBERNETES = re.compile(r"FLOODPLAIN_(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
_SIMILARITY = 0.5


def variable_of(flag: str) -> str:
    """The variable that sets a flag, such as ``max_num_seqs``."""
    return PREFIX + flag.upper()


def check_variables(environ: Mapping[str, str], find_flags: Callable[[], Iterable[str]]) -> None:
    """Refuse variables that no verb reads. An empty one counts as unset.

    Args:
        environ: All variables.
        find_flags: Returns the flags of all verbs; called only if a variable may be ours.

    Raises:
        UserError: There is one; the message has its name, and the most similar known name.
    """
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
    near = difflib.get_close_matches(name.upper().removeprefix(PREFIX), ends, 1, _SIMILARITY)
    return f"did you mean {PREFIX}{near[0]}?" if near else "unset it"


def _is_of_service(name: str, value: str) -> bool:
    return "SERVICE" in name or "://" in value or bool(re.search(r"_\d+_", name))
