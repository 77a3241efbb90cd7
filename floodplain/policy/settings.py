"""Settings of the policies that time-slice the device, with defaults for each policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from floodplain.core.errors import SettingRefused

FAIR_BY = ("request", "key")
"""What ``fair`` can count work by: each request, or each API key."""

SLICE_STEPS = {"cfs": 16, "fair": 12, "paced": 3, "timely": 10}
"""Default steps of a slice under each policy. Under ``cfs`` and ``fair`` nearly all requests take turns, so turns must
be rare; under ``paced`` the core stays resident, and turns last a few tokens; under ``timely`` streams that have missed
a goal are swapped out for longer. ``timely`` uses ``paced``'s slice while all goals fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingSettings:
    """Settings of the policies that take turns; each ignores what is not for it.

    Attributes:
        slice_steps: Least steps for which a sequence stays after it is put on the device (``--slice``); ``cfs``:
            steps of all slices. The default here is that of ``paced``; ``settings_for`` has each policy's.
        ttft_goal_s: ``paced``, ``timely``: seconds to a first token that users were promised (``--ttft-goal``). Under
            ``paced``, newcomers then go first even if prompts are most of the work.
        tpot_goal_s: ``paced``, ``timely``: seconds per token after the first one that users were promised
            (``--tpot-goal``, ``--pace``); None: five times what a token takes without load, by step prices.
        max_gap_s: ``paced``, ``timely``: newcomers wait while a stream has been silent for longer (``--max-gap``);
            None: the time of ``GAP_TOKENS`` at the TPOT goal, so that it follows step prices if the goal does.
        line_patience: ``timely``: a request that cannot meet its TTFT goal waits at most so many times as long as the
            longest wait under FCFS (``--line-patience``).
        rotation_share: ``paced``: this part of the device serves turns while TPOT goals cannot all be kept; the rest
            finishes requests by arrival.
        prefill_share: Most part of a step's time for prompts in a step with decodes.
        prompt_share: ``paced``: newcomers go first while prompts are at most this part of the work.
        fair_by: ``fair``: whether work is counted for each request or for each API key.
        is_synchronous: AQUA's switch (a baseline): no backups ahead, no compute while copies are under way.

    Raises:
        SettingRefused: A value is out of its range.
    """

    slice_steps: int = SLICE_STEPS["paced"]
    ttft_goal_s: float | None = None
    tpot_goal_s: float | None = None
    max_gap_s: float | None = 6.0
    line_patience: float = 1.1
    rotation_share: float = 0.3
    prefill_share: float = 0.5
    prompt_share: float = 0.3
    fair_by: str = "request"
    is_synchronous: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.slice_steps <= 10_000:
            raise SettingRefused(("slice",), f"must be between 1 and 10000 steps, not {self.slice_steps}")
        for name, goal_s in (("ttft_goal", self.ttft_goal_s), ("tpot_goal", self.tpot_goal_s)):
            if goal_s is not None and not 0 < goal_s <= 1e6:
                raise SettingRefused((name,), f"must be above 0 seconds, not {goal_s}")
        if self.fair_by not in FAIR_BY:
            raise SettingRefused(("fair_by",), f"must be one of {', '.join(FAIR_BY)}, not {self.fair_by!r}")
        if self.max_gap_s is not None and not self.max_gap_s > 0:
            raise SettingRefused(("max_gap",), f"must be above 0 seconds, not {self.max_gap_s}")
        if not 1 <= self.line_patience <= 1000:
            raise SettingRefused(("line_patience",), f"must be between 1 and 1000, not {self.line_patience}")
        if not (0 < self.rotation_share < 1 and 0 < self.prefill_share < 1):
            raise SettingRefused(("rotation_share", "prefill_share"), "lie between 0 and 1")
        if not 0 <= self.prompt_share <= 1:
            raise SettingRefused(("prompt_share",), "lies between 0 and 1")


def settings_for(policy: str, **changes: Any) -> SharingSettings:
    """A policy's default settings, with ``changes`` to fields of ``SharingSettings``; ``fcfs`` reads none.

    ``changes`` may have ``pace`` in tokens per second, the inverse of the TPOT goal, instead of ``tpot_goal_s``.
    SettingRefused if a value is out of its range.
    """
    pace = changes.pop("pace", None)
    if pace is not None:
        if changes.get("tpot_goal_s") is not None:
            raise SettingRefused(("pace", "tpot_goal"), "say the same thing: leave one out")
        if not 0 < pace <= 1e6:
            raise SettingRefused(("pace",), f"must be above 0 tokens per second, not {pace}")
        changes["tpot_goal_s"] = 1 / pace
    slice_steps = SLICE_STEPS.get(policy, SLICE_STEPS["paced"])
    return SharingSettings(**{"slice_steps": slice_steps} | changes)
