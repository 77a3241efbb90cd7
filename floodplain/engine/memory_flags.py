"""Parses and checks the flags of leases and of ``--kv-expansion``, and refuses contradictory ones."""

from __future__ import annotations

import math

from floodplain.core.errors import UserError
from floodplain.core.sizes import parse_size
from floodplain.engine.flags import (
    DEFAULT_LEASE_IDLE_S,
    DEFAULT_LEND_AFTER_S,
    DEFAULT_RECALL_DEADLINE_S,
    HOST_TIER,
    PEER_TIER,
    EngineFlags,
)
from floodplain.memory.host.named_file import NAME

MIN_LEND_AFTER_S, MAX_LEND_AFTER_S = 0.1, 86400.0
MIN_LOOK_S, MAX_LOOK_S = 0.001, 1.0
MIN_LEASE_IDLE_S, MAX_LEASE_IDLE_S = 0.1, 86400.0
MIN_RECALL_DEADLINE_S, MAX_RECALL_DEADLINE_S = 0.5, 86400.0
"""At least 0.5 s, since consumers take their last resort a quarter of a second before the deadline."""


def read_lend(word: str) -> int | None:
    """Most bytes to lend: 0 for ``off``; None, as much as can be spared, for ``auto``.

    Raises:
        UserError: ``--lend`` is neither off, auto nor a size.
    """
    if word in ("off", "auto"):
        return 0 if word == "off" else None
    try:
        return parse_size(word)
    except UserError as error:
        raise UserError(f"--lend must be off, auto, or a size: {error}") from None


def check_leases(flags: EngineFlags) -> None:
    """Check that flags of leases do not contradict each other and are in their ranges.

    Raises:
        UserError: They do or are not; the message names the flags.
    """
    lent_bytes = read_lend(flags.lend)
    if flags.coordinator is None:
        _check_alone(flags, lent_bytes)
    if flags.lease_look is not None and not MIN_LOOK_S <= flags.lease_look <= MAX_LOOK_S:
        raise UserError(
            f"--lease-look must be between {MIN_LOOK_S:g} and {MAX_LOOK_S:g} s, not {flags.lease_look}: rarer looks "
            "would let deadlines pass"
        )
    _check_range("--lend-after", flags.lend_after, MIN_LEND_AFTER_S, MAX_LEND_AFTER_S)
    _check_range("--recall-deadline", flags.recall_deadline, MIN_RECALL_DEADLINE_S, MAX_RECALL_DEADLINE_S)
    _check_idle(flags)
    if flags.lend == "off":
        _check_lends_nothing(flags)
    if flags.profile is not None and flags.lend != "auto":
        raise UserError(f"--profile says what --lend auto starts from, and --lend is {flags.lend}: change one of them")
    if flags.device_name is not None and not NAME.fullmatch(flags.device_name):
        raise UserError(f"--device-name {flags.device_name!r} must be 1 to 64 letters, digits, '.', '_' or '-'")


def _check_alone(flags: EngineFlags, lent_bytes: int | None) -> None:
    """Refuse flags that need a coordinator."""
    if flags.swap == "peer":
        raise UserError("--swap peer needs --coordinator: it knows which devices lend memory")
    if lent_bytes != 0:
        raise UserError(f"--lend {flags.lend} needs --coordinator: it tells borrowers of lent memory")
    if flags.lease_look is not None:
        raise UserError("--lease-look needs --coordinator: without one there are no leases to look at")
    if flags.coordinator_token_file is not None:
        raise UserError("--coordinator-token-file needs --coordinator: the token is sent to it")


def _check_idle(flags: EngineFlags) -> None:
    if flags.lease_idle != 0 and not MIN_LEASE_IDLE_S <= flags.lease_idle <= MAX_LEASE_IDLE_S:
        raise UserError(
            f"--lease-idle must be between {MIN_LEASE_IDLE_S:g} and {MAX_LEASE_IDLE_S:g} s, or 0 to return nothing, "
            f"not {flags.lease_idle}"
        )
    if flags.lease_idle != DEFAULT_LEASE_IDLE_S and flags.swap != "peer":
        raise UserError(
            f"--lease-idle says when to return what was borrowed, and --swap {flags.swap} borrows nothing: leave one "
            "of them out"
        )


def _check_lends_nothing(flags: EngineFlags) -> None:
    """Refuse flags that need ``--lend``."""
    if flags.lend_after != DEFAULT_LEND_AFTER_S:
        raise UserError("--lend-after says when to lend, and --lend off does not: leave one of them out")
    if flags.recall_deadline != DEFAULT_RECALL_DEADLINE_S:
        raise UserError("--recall-deadline says how to recall, and --lend off lends nothing: leave one of them out")


def _check_range(flag: str, value_s: float, least_s: float, most_s: float) -> None:
    if not least_s <= value_s <= most_s:
        raise UserError(f"{flag} must be between {least_s:g} and {most_s:g} s, not {value_s}")


def read_expansion(word: str) -> float | None:
    """The expansion that the flag asks for: 1 for ``off``, None for ``auto``.

    Raises:
        UserError: ``--kv-expansion`` is neither off, auto nor a number above 1.
    """
    if word in ("off", "auto"):
        return 1.0 if word == "off" else None
    try:
        expansion = float(word)
    except ValueError:
        expansion = 0.0
    if not 1.0 < expansion < math.inf:
        raise UserError(f"--kv-expansion must be off, auto, or a number above 1, not {word!r}")
    return expansion


def check_expansion(flags: EngineFlags) -> None:
    """Check that flags of the expansion do not contradict each other or ``--lend``.

    Raises:
        UserError: They do; the message names the flags.
    """
    expansion = read_expansion(flags.kv_expansion)
    if expansion == 1.0:
        for name, is_set in (("--expansion-memory", flags.expansion_memory is not None),
                             ("--expansion-tier", flags.expansion_tier != HOST_TIER),
                             ("--long-prompts", flags.long_prompts)):  # fmt: skip
            if is_set:
                raise UserError(f"{name} says how to expand, and --kv-expansion off does not: leave one of them out")
    elif flags.lend != "off":
        raise UserError(
            f"--kv-expansion {flags.kv_expansion} takes the pages of layers, and --lend {flags.lend} gives the same "
            "pages away: leave one of them out"
        )
    elif flags.expansion_tier == PEER_TIER and flags.coordinator is None:
        raise UserError("--expansion-tier peer needs --coordinator: it alone knows which neighbours lend memory")
    if flags.long_prompts and expansion is None and flags.max_model_len is None:
        raise UserError("--long-prompts with --kv-expansion auto needs --max-model-len: how long may a request be?")
