"""A simulated device: it answers every plan with tokens, and computes the time of the step and its copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from floodplain.core.plan import StepPlan, StepResult, Transfer, TransferKind
from floodplain.core.tiers import CopyTime, Direction, Link, Tier

DUMMY_TOKEN = 0
"""The token that every step samples. Requests end by ``max_tokens``; only prompts make contents differ."""


@dataclass(frozen=True, slots=True)
class StepLine:
    """The time of a step as a linear function of its work (least squares over measured steps).

    Attributes:
        base_s: Seconds of any step.
        decode_s: Seconds for each decode.
        prefill_token_s: Seconds for each token of a prompt.
    """

    base_s: float
    decode_s: float
    prefill_token_s: float

    def time_s(self, plan: StepPlan) -> float:
        """Seconds of a plan; 0 for a plan that only moves KV."""
        num_decodes, num_prefill = plan.count_work()
        if not (num_decodes or num_prefill):
            return 0.0
        return self.base_s + self.decode_s * num_decodes + self.prefill_token_s * num_prefill


class VirtualLinks:
    """Links on which copies of one direction run one at a time; the two directions are independent.

    Args:
        links: Links by the tier at their far end; the caller may change them during the simulation.
        block_bytes: Bytes of one KV block.
    """

    def __init__(self, links: Mapping[Tier, Link], block_bytes: int) -> None:
        self._links = links
        self._times: list[tuple[float, CopyTime]] = []
        self._block_bytes = block_bytes
        self._free_at_s: dict[tuple[Tier, Direction], float] = {}
        self.moved_bytes = dict.fromkeys(TransferKind, 0)

    def start(self, transfer: Transfer, now: float) -> float:
        """Start a copy; returns the time when it ends. A copy over several tiers ends with the slowest of them."""
        direction = transfer.kind.direction
        ends = [now]
        for tier in {location.tier for location in transfer.locations}:
            num_blocks = sum(location.tier is tier for location in transfer.locations)
            link, key = self._links[tier], (tier, direction)
            duration_s = link.latency_s + num_blocks * self._block_bytes / link.bandwidth
            self._free_at_s[key] = max(now, self._free_at_s.get(key, 0.0)) + duration_s
            self._times.append((self._free_at_s[key], CopyTime(tier, direction, 1, num_blocks, duration_s)))
            self.moved_bytes[transfer.kind] += num_blocks * self._block_bytes
            ends.append(self._free_at_s[key])
        return max(ends)

    def take_copy_times(self, now: float) -> list[CopyTime]:
        """The busy times of links for the copies that ended since the last call."""
        ended = [copied for end, copied in self._times if end <= now]
        self._times = [(end, copied) for end, copied in self._times if end > now]
        return ended


class VirtualExecutor:
    """Computes the time and the result of plans; ``sim.instance`` schedules their ends.

    Args:
        step_time_s: Returns the seconds of a plan.
        links: The links of transfers.
    """

    def __init__(self, step_time_s: Callable[[StepPlan], float], links: VirtualLinks) -> None:
        self.step_time_s = step_time_s
        self.links = links

    def execute(self, plan: StepPlan) -> StepResult:
        """The tokens of a plan."""
        return StepResult(plan.step_id, [DUMMY_TOKEN] * len(plan.sampled))
