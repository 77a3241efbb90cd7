"""Limits from the size of the KV pool: the longest request, what a lender's profile leaves free, the blocks to lend."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from floodplain.core.errors import UserError
from floodplain.core.sizes import show_size
from floodplain.engine.config import EngineConfig
from floodplain.files.profile import read_profile, warn_if_foreign
from floodplain.lending.lent_pool import PoolLimits
from floodplain.model.network.config import ModelConfig
from floodplain.policy.lending import LendingSettings


@dataclass(frozen=True, slots=True)
class SteadyState:
    """The highest load that meets the goals: its rate, its KV in use, and the most bytes to lend (0: a consumer)."""

    rate_rps: float
    peak_bytes: int
    free_bytes: int

    def refine(self, settings: LendingSettings, block_bytes: int) -> LendingSettings:
        """The settings with this load's rate and peak."""
        return replace(settings, profiled_rate=self.rate_rps, profiled_peak_blocks=-(-self.peak_bytes // block_bytes))


def read_steady_state(config: EngineConfig, machine: str) -> SteadyState | None:
    """Read the steady state from the llm profile of the flags; None without one. Raises UserError if the file is none.

    A profile of another model or machine is a warning; the machine of a virtual one is not compared.
    """
    profile = config.profile
    if profile is None:
        return None
    known = read_profile(Path(profile), "llm")
    warn_if_foreign(Path(profile), known, config.model, None if known.is_virtual else machine)
    if not known.spare_bytes:
        logger.warning("%s says that %s is a consumer: nothing is lent", profile, known.subject)
    else:
        logger.info("up to %s are lent, as %s says", show_size(known.spare_bytes), profile)
    return SteadyState(float(known.result["rate_rps"]), int(known.result["peak_kv_bytes"]), known.spare_bytes)


logger = logging.getLogger(__name__)

_AUTO_SHARE = 2
"""With ``--lend auto`` and without ``--max-model-len``, a request may need one part in so many of the pool."""


def find_limits(
    config: EngineConfig,
    model: ModelConfig,
    num_blocks: int,
    block_bytes: int,
    steady: SteadyState | None = None,
) -> PoolLimits:
    """The limits of the flags, else of model and pool; UserError if they do not fit. ``steady`` limits lending.

    ``num_blocks`` are the pool's while nothing is lent.
    """
    asked_lent = _lent_blocks(config, block_bytes)
    spare = num_blocks if steady is None else min(num_blocks, steady.free_bytes // block_bytes)
    smallest = num_blocks // _AUTO_SHARE if asked_lent is None else num_blocks - asked_lent
    smallest = max(smallest, num_blocks - spare)
    if config.max_model_len is not None:
        max_model_len = _check_length(config, model, num_blocks if asked_lent is None else smallest)
    else:
        max_model_len = _choose_length(config, model, smallest)
    least = -(-max_model_len // config.block_tokens)
    most_lent = min(spare, num_blocks - least) if asked_lent is None else asked_lent
    return PoolLimits(num_blocks, least, most_lent, max_model_len)


def _lent_blocks(config: EngineConfig, block_bytes: int) -> int | None:
    """Whole blocks that the flags allow to lend; None: as many as can be spared."""
    num_bytes = config.most_lent_bytes
    if config.lends and num_bytes is not None and num_bytes < block_bytes:
        raise UserError(f"--lend {config.lend} is less than one KV block of {show_size(block_bytes)}: raise it")
    return None if num_bytes is None else num_bytes // block_bytes


def _choose_length(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    num_tokens, longest = max(0, num_blocks) * config.block_tokens, model.shape.max_position
    while_lending, lower = (" while it lends", ", or lower --lend") if config.lends else ("", "")
    if num_tokens < 2:
        raise UserError(
            f"the KV pool holds {num_tokens} tokens{while_lending}, too few for a request: raise --kv-memory{lower}"
        )
    if num_tokens < longest:
        logger.warning(
            "max_model_len is lowered from %d to %d tokens: the KV pool holds no more%s",
            longest, num_tokens, while_lending,
        )  # fmt: skip
    return min(num_tokens, longest)


def _check_length(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    assert config.max_model_len is not None
    num_tokens, longest = max(0, num_blocks) * config.block_tokens, model.shape.max_position
    if config.max_model_len > longest:
        raise UserError(f"--max-model-len {config.max_model_len} is more than the model's own {longest}")
    if config.max_model_len > num_tokens:
        beside, lower = (f" beside --lend {config.lend}", " or --lend") if config.lends else ("", "")
        raise UserError(
            f"--max-model-len {config.max_model_len} does not fit: the KV pool holds {num_tokens} tokens{beside}; "
            f"raise --kv-memory, or lower --max-model-len{lower}"
        )
    return config.max_model_len
