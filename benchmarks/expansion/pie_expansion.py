"""Pie's adaptive expansion (arXiv 2411.09317, section 3.4.2): the baseline for ``policy.expansion``. Pure.

It predicts nothing. If the link is idle while a step still computes, the expansion is too small: one layer more
streams. If compute waits, it is too large: one layer less. Whether more memory serves more is tried: the throughput of
an expansion is compared with the record of the smaller one before it. Without a gain, the smaller one is used again,
and the larger one is retried later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from floodplain.core.errors import InvariantError
from floodplain.core.layer_places import LayerPlaces
from floodplain.policy.expansion import ExpansionDecision, ExpansionLimit, ExpansionView


@dataclass(frozen=True, slots=True, kw_only=True)
class PieSettings:
    """Numbers that the paper leaves open. Of 16 settings tried in virtual time, the defaults served most.

    Attributes:
        trial_steps: Steps after which an expansion is judged ("records").
        violations: Part of these steps in which the link was idle, or compute waited, that triggers a change ("a preset
            ratio"); less is tolerated as interference.
        least_scaling: Least throughput of an expansion over that of the smaller one before it; less is no scaling.
        probe_trials: Trials after which an expansion that did not scale is tried again ("periodically").
        least_wait: Part of a step that counts as waiting.

    Raises:
        InvariantError: A number is out of its range.
    """

    trial_steps: int = 16
    violations: float = 0.5
    least_scaling: float = 1.0
    probe_trials: int = 4
    least_wait: float = 0.005

    def __post_init__(self) -> None:
        if not (self.trial_steps >= 1 and self.probe_trials >= 1 and 0 < self.violations <= 1):
            raise InvariantError(f"trials take steps, and violations are a part of them: {self}")


class PieExpansion:
    """Pie's rule with the interface of ``ExpansionPolicy``.

    Throughput is measured as held blocks per second: with requests of one kind, each step generates one token per so
    many blocks.

    Args:
        places: What may be chosen, by ascending expansion. It begins with the first.
        settings: Numbers of its own.
    """

    def __init__(self, places: Sequence[LayerPlaces], settings: PieSettings = PieSettings()) -> None:
        self.settings = settings
        self._places = tuple(places)
        self._index = {one.num_streamed: index for index, one in enumerate(self._places)}
        self._trial: list[ExpansionView] = []
        self._served: dict[int, float] = {}  # records: blocks per second, by index
        self._came_from: int | None = None  # the smaller expansion that the present one is compared with
        self._num_resting = 0  # trials until the next probe
        self._decided = ExpansionDecision(self._places[0].num_streamed)

    def decide(self, view: ExpansionView) -> ExpansionDecision:
        """The number of layers to stream from this boundary on; it is constant within a trial.

        Raises:
            InvariantError: The view's ``num_streamed`` is that of none of the places.
        """
        here = self._index.get(view.num_streamed)
        if here is None:
            raise InvariantError(f"{view.num_streamed} layers stream, which is none of {sorted(self._index)}")
        if view.step_s > 0:
            self._trial.append(view)
        if len(self._trial) >= self.settings.trial_steps:
            target, limited = self._judge(here)
            self._trial.clear()
            self._decided = ExpansionDecision(self._places[target].num_streamed, limited)
        return self._decided

    def _judge(self, here: int) -> tuple[int, ExpansionLimit | None]:
        self._served[here] = self._count_served()
        came_from, self._came_from = self._came_from, None
        self._num_resting = max(0, self._num_resting - 1)
        if here and self._waits():
            self._num_resting = self.settings.probe_trials
            return here - 1, ExpansionLimit.COPIES_SHOW
        if came_from is not None and came_from < here and not self._has_scaled(came_from, here):
            self._num_resting = self.settings.probe_trials
            return came_from, ExpansionLimit.LITTLE_GAIN
        if here + 1 == len(self._places):
            return here, ExpansionLimit.LARGEST
        if self._num_resting:
            return here, ExpansionLimit.LITTLE_GAIN
        if not self._is_link_idle():
            return here, ExpansionLimit.COPIES_SHOW
        self._came_from = here
        return here + 1, None

    def _count_served(self) -> float:
        elapsed_s = sum(step.step_s + step.stall_s for step in self._trial)
        return sum(step.num_held_blocks for step in self._trial) / elapsed_s

    def _has_scaled(self, smaller: int, larger: int) -> bool:
        return self._served[larger] >= self.settings.least_scaling * self._served[smaller]

    def _waits(self) -> bool:
        return self._is_often([step.stall_s > self.settings.least_wait * step.step_s for step in self._trial])

    def _is_link_idle(self) -> bool:
        """Whether the loads of all streamed layers often ended while the step still computed."""
        return self._is_often([step.num_streamed * step.copy_s < step.step_s for step in self._trial])

    def _is_often(self, seen: list[bool]) -> bool:
        return sum(seen) >= self.settings.violations * len(seen)
