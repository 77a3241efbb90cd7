"""How many layers of the KV cache stream: as many as load needs and as overlap with compute. Pure.

*Up* while memory is short and copies would overlap with compute. *Down* when compute waits, or when memory is not
needed. The stall of a step is predicted (``cost.expansion``) from its time without stalls, the time of a load, and
which layers stream; Pie (arXiv 2411.09317) finds the number by trial. Each recent step is judged by itself: steps of
decodes alone are shorter than the mean, and spare time of a long step cannot be used in a short one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from floodplain.core.errors import InvariantError
from floodplain.core.layer_places import LayerPlaces
from floodplain.cost.expansion import step_stall_s

LEAST_GAIN = 1.02
"""Ratio of tokens per second with and without streamed layers, below which ``auto`` streams no layer."""

_GROSS_STALL = 4.0
"""Measured stalls above so many times ``most_stall`` mean that the prediction is wrong. Below that they are noise:
fewer streamed layers would cost more."""


class ExpansionLimit(Enum):
    """Why no more layers stream."""

    MEMORY_SUFFICES = "memory is not short"
    COPIES_SHOW = "copies would not hide"
    LITTLE_GAIN = "gain below 2 %"
    LARGEST = "no more layers may stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpansionView:
    """Measurements at a boundary between two steps.

    Attributes:
        step_s: Time of the step that has ended, without stalls; 0 if the boundary follows no step.
        stall_s: Time for which its compute waited for loads.
        copy_s: Link time to load what the step reads of one layer, measured or, without streams, estimated.
        is_binding: Sequences wait or were preempted because blocks are short.
        fixed_s: Part of ``step_s`` that a larger batch does not lengthen. None: all of it, which makes gains look as
            large as the expansion.
    """

    step_s: float
    stall_s: float
    copy_s: float
    num_streamed: int
    num_held_blocks: int
    num_blocks: int
    is_binding: bool
    fixed_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpansionSettings:
    """When the number of streamed layers changes; InvariantError for settings that contradict each other.

    Attributes:
        hold_steps: Least steps between two changes, and the steps between two reviews.
        window_steps: Recent steps that are judged.
        calm_steps: Steps without a shortage of memory after which the number may shrink.
        retry_steps: Steps after a stall during which so many layers do not stream again.
        most_stall: Part of the time for which compute may wait. Above half of it, the number does not grow.
        margin: The number grows only if copies would still overlap if they took longer by this part.
        room: Part of a smaller pool that the peak of the calm steps may take.
        most_growth: Most ratio of blocks after and before a growth, unless one layer is more.
    """

    hold_steps: int = 16
    window_steps: int = 64
    calm_steps: int = 256
    retry_steps: int = 512
    most_stall: float = 0.01
    margin: float = 0.02
    room: float = 0.85
    most_growth: float = 1.2

    def __post_init__(self) -> None:
        if not 1 <= self.hold_steps <= self.window_steps <= self.calm_steps <= self.retry_steps:
            raise InvariantError(f"steps must be 1 <= hold <= window <= calm <= retry: {self}")
        if not (0 < self.most_stall < 1 and self.margin >= 0 and 0 < self.room <= 1 <= self.most_growth):
            raise InvariantError(f"parts lie between 0 and 1, and growth is at least 1: {self}")


@dataclass(frozen=True, slots=True)
class ExpansionDecision:
    """How many layers stream from now on, and why not more (None while the number grows)."""

    num_streamed: int
    limited: ExpansionLimit | None = None


class ExpansionPolicy:
    """Decides how many layers stream. Equal views in equal order give equal decisions.

    It begins with the first of ``places`` (by ascending expansion), and can always return to it. ``base_blocks`` are
    those of the pool while no layer streams.
    """

    def __init__(
        self, places: Sequence[LayerPlaces], base_blocks: int, settings: ExpansionSettings = ExpansionSettings()
    ) -> None:
        self.settings = settings
        self._places = tuple(places)
        self._num_blocks = [base_blocks * one.expansion for one in self._places]
        self._index = {one.num_streamed: index for index, one in enumerate(self._places)}
        self._steps: deque[ExpansionView] = deque(maxlen=settings.calm_steps)
        self._decided = ExpansionDecision(self._places[0].num_streamed, ExpansionLimit.MEMORY_SUFFICES)
        self._num_unreviewed = 0
        self._waited_at = len(self._places)  # the last place at which compute waited for copies,
        self._retry_steps = 0  # and the steps until it is tried again

    def decide(self, view: ExpansionView) -> ExpansionDecision:
        """The number of layers to stream from this boundary on; it is constant between two reviews.

        InvariantError if the view's ``num_streamed`` is that of none of the places.
        """
        here = self._index.get(view.num_streamed)
        if here is None:
            raise InvariantError(f"{view.num_streamed} layers stream, which is none of {sorted(self._index)}")
        if view.step_s <= 0:
            return self._decided
        self._steps.append(view)
        self._num_unreviewed += 1
        self._retry_steps -= 1
        if self._num_unreviewed >= self.settings.hold_steps:
            self._num_unreviewed = 0
            target, limited = self._review(here)
            self._decided = ExpansionDecision(self._places[target].num_streamed, limited)
        return self._decided

    def _review(self, here: int) -> tuple[int, ExpansionLimit | None]:
        if here and self._stall_share(here, self.settings.window_steps) > _GROSS_STALL * self.settings.most_stall:
            self._forget_all_but(self.settings.hold_steps)
        if here and self._waits(here):
            self._waited_at, self._retry_steps = here, self.settings.retry_steps
            fewer = (
                index
                for index in range(here - 1, 0, -1)
                if self._stall_share(index, self.settings.calm_steps) <= self._low_stall
            )
            return next(fewer, 0), ExpansionLimit.COPIES_SHOW
        needed = self._find_needed(here)
        if needed < here or not self._is_short():
            return needed, ExpansionLimit.MEMORY_SUFFICES
        return self._find_larger(here)

    # -- measurements of steps -------------------------------------------------------------------------------------

    @property
    def _low_stall(self) -> float:
        return self.settings.most_stall / 2

    def _recent(self, num_steps: int) -> list[ExpansionView]:
        return list(islice(reversed(self._steps), num_steps))

    def _forget_all_but(self, num_steps: int) -> None:
        """Keep only the latest ``num_steps`` steps: older ones no longer predict stalls."""
        self._steps = deque(islice(self._steps, max(0, len(self._steps) - num_steps), None), self._steps.maxlen)

    def _stall_share(self, index: int, num_steps: int, longer: float = 1.0) -> float:
        """Predicted stalled part of recent steps' time at place ``index``, with copies ``longer`` times as long."""
        steps = self._recent(num_steps)
        waited_s = sum(self._predict_stall_s(index, step, longer) for step in steps)
        return waited_s / (waited_s + sum(step.step_s for step in steps))

    def _predict_stall_s(self, index: int, step: ExpansionView, longer: float) -> float:
        """Predicted stall of a step: KV grows with the pool if memory is short, else it stays; ``step_s`` stays."""
        num_blocks = self._num_blocks[index]
        if step.is_binding:
            factor = num_blocks / max(1, step.num_blocks)
        else:
            factor = min(1.0, num_blocks / max(1, step.num_held_blocks))
        return step_stall_s(self._places[index], step.step_s, factor * longer * step.copy_s)

    def _waits(self, here: int) -> bool:
        most = self.settings.most_stall
        return (
            self._stall_share(here, self.settings.calm_steps) > most or self._measured_share(here) > _GROSS_STALL * most
        )

    def _measured_share(self, here: int) -> float:
        """Measured stalled part of the time of recent steps; 0 if fewer than half of them had place ``here``."""
        num_streamed = self._places[here].num_streamed
        steps = [one for one in self._recent(self.settings.window_steps) if one.num_streamed == num_streamed]
        if len(steps) < self.settings.window_steps // 2:
            return 0.0
        waited_s = sum(one.stall_s for one in steps)
        return waited_s / (waited_s + sum(one.step_s for one in steps))

    def _is_short(self) -> bool:
        """Whether memory was short in half of the steps since the last review."""
        steps = self._recent(self.settings.hold_steps)
        return 2 * sum(step.is_binding for step in steps) >= len(steps)

    # -- decisions -------------------------------------------------------------------------------------------------

    def _find_needed(self, here: int) -> int:
        """The smallest place that holds the peak of the calm steps within ``room``; ``here`` if memory was short."""
        if len(self._steps) < self.settings.calm_steps or any(step.is_binding for step in self._steps):
            return here
        peak = max(step.num_held_blocks for step in self._steps)
        enough = (index for index in range(here) if self.settings.room * self._num_blocks[index] >= peak)
        return next(enough, here)

    def _find_larger(self, here: int) -> tuple[int, ExpansionLimit | None]:
        least = self._find_least_larger(here)
        if least is None:
            return here, ExpansionLimit.LITTLE_GAIN
        if least >= len(self._places):
            return here, ExpansionLimit.LARGEST
        most = least
        while most + 1 < len(self._places) and self._is_near(here, most + 1):
            most += 1
        if self._would_hide(least):
            return next(index for index in range(most, least - 1, -1) if self._would_hide(index)), None
        is_least_larger = least == here + 1 or not self._would_hide(here + 1)
        return here, ExpansionLimit.COPIES_SHOW if is_least_larger else ExpansionLimit.LITTLE_GAIN

    def _find_least_larger(self, here: int) -> int | None:
        """The next larger place; if no layer streams yet, the first that gains enough. None if none does."""
        if self._places[here].num_streamed or len(self._places) == 1:
            return here + 1
        return next((index for index in range(1, len(self._places)) if self._gain(index) >= LEAST_GAIN), None)

    def _is_near(self, here: int, index: int) -> bool:
        return self._num_blocks[index] <= self.settings.most_growth * self._num_blocks[here]

    def _would_hide(self, index: int) -> bool:
        if index >= self._waited_at and self._retry_steps > 0:
            return False
        return self._stall_share(index, self.settings.calm_steps, 1 + self.settings.margin) <= self._low_stall

    def _gain(self, index: int) -> float:
        """Predicted ratio of tokens per second at place ``index`` and without streams, if no step stalls."""
        steps = self._recent(self.settings.window_steps)
        step_s = sum(step.step_s for step in steps)
        fixed_s = sum(step.step_s if step.fixed_s is None else min(step.step_s, step.fixed_s) for step in steps)
        expansion = self._places[index].expansion
        return expansion * step_s / (fixed_s + expansion * (step_s - fixed_s))
