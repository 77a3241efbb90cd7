"""Parses and checks the flags of ``--kv-expansion``, and refuses contradictory ones."""

from __future__ import annotations

import math

from floodplain.core.errors import UserError
from floodplain.engine.flags import HOST_TIER, PEER_TIER, EngineFlags


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
