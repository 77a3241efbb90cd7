"""Policies by the names of ``--policy``."""

from __future__ import annotations

from floodplain.core.errors import UserError
from floodplain.policy.base import Policy
from floodplain.policy.fcfs import FcfsPolicy

_POLICIES: dict[str, type[Policy]] = {"fcfs": FcfsPolicy}


def make_policy(name: str) -> Policy:
    """A new policy object.

    Raises:
        UserError: There is no policy of that name.
    """
    if name not in _POLICIES:
        raise UserError(f"--policy must be one of {', '.join(sorted(_POLICIES))}, not {name!r}")
    return _POLICIES[name]()
