"""A lender's steady state, from a profile: its load, and what stays free (AQUA, section 6)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from floodplain.core.sizes import show_size
from floodplain.files.profile import read_profile
from floodplain.policy.lending import LendingSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SteadyState:
    """The highest load that meets the goals: its rate, its KV in use, and the most bytes to lend (0: a consumer)."""

    rate_rps: float
    peak_bytes: int
    free_bytes: int

    def refine(self, settings: LendingSettings, block_bytes: int) -> LendingSettings:
        """The settings with this load's rate and peak."""
        return replace(settings, profiled_rate=self.rate_rps, profiled_peak_blocks=-(-self.peak_bytes // block_bytes))


def read_steady_state(profile: str | None) -> SteadyState | None:
    """Read the steady state from an llm profile; None without one. Raises UserError if the file is none."""
    if profile is None:
        return None
    known = read_profile(Path(profile), "llm")
    if not known.spare_bytes:
        logger.warning("%s says that %s is a consumer: nothing is lent", profile, known.subject)
    else:
        logger.info("up to %s are lent, as %s says", show_size(known.spare_bytes), profile)
    return SteadyState(float(known.result["rate_rps"]), int(known.result["peak_kv_bytes"]), known.spare_bytes)
