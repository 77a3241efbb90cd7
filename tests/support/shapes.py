"""Bursts of every size and shape that exceed their machine, for laws of ``fair``."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import cycle

from hypothesis import strategies as st

from floodplain.core.request import Request
from floodplain.core.view import SequenceView, View
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from tests.support.bursts import Machine, Recorder, Run, burst, make_burst

POOL_TOKENS = 320


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a burst that exceeds its machine."""

    num_requests: int
    interval_ms: int
    num_prompt: int
    max_tokens: int
    block_tokens: int
    slice_steps: int
    priorities: tuple[int, ...] = (0,)
    """Priorities of consecutive requests, repeated."""

    num_shared: int = 0
    """Length of the common prefix of all prompts. Without one, no block stays cached."""

    @property
    def machine(self) -> Machine:
        return Machine(
            num_blocks=POOL_TOKENS // self.block_tokens,
            block_tokens=self.block_tokens,
            num_slots=20_000,
            block_s=3e-6 * self.block_tokens,
            max_num_seqs=256,
            max_batched_tokens=256,
            caches_prefixes=self.num_shared > 0,
        )

    @property
    def turn_tokens(self) -> int:
        """The least tokens of a turn.

        A stream whose blocks are all still on the device resumes without a copy, in a step that computes nothing of it;
        its slice begins in that step: one token less.
        """
        return self.slice_steps - (self.num_shared > 0)

    def requests(self) -> list[Request]:
        requests = make_burst(
            self.num_requests,
            interval_s=self.interval_ms / 1e3,
            num_prompt=self.num_prompt,
            max_tokens=self.max_tokens,
            num_shared=self.num_shared,
        )
        priorities = cycle(self.priorities)
        return [replace(one, priority=next(priorities)) for one in requests]

    def run(self, policy: str) -> tuple[Run, Recorder]:
        recorder = Recorder(make_policy(policy, SharingSettings(slice_steps=self.slice_steps)))
        return burst(self.machine, recorder, self.requests()), recorder


SHAPES = st.builds(
    Shape,
    num_requests=st.integers(20, 50),
    interval_ms=st.sampled_from([0, 2, 10, 20]),
    num_prompt=st.integers(8, 48),
    max_tokens=st.integers(16, 60),
    block_tokens=st.sampled_from([4, 8, 16]),
    slice_steps=st.integers(2, 8),
)

SHARING_SHAPES = st.builds(
    Shape,
    num_requests=st.integers(30, 50),
    interval_ms=st.sampled_from([0, 2, 10]),
    num_prompt=st.integers(20, 48),
    max_tokens=st.integers(24, 60),
    block_tokens=st.sampled_from([4, 8, 16]),
    slice_steps=st.integers(2, 8),
    num_shared=st.sampled_from([8, 16]),
)
"""Prompts with a common prefix, which is stored once: the other tokens alone must exceed the pool."""


def work_of(row: SequenceView, view: View) -> float:
    """Return the work of a request: its credit, plus the tokens it generated."""
    return row.credit + max(0, row.num_generated(view.step))


def count_between(times: list[float], begin_s: float, end_s: float) -> int:
    """Return how many of these times are in the interval, its beginning included."""
    return max(0, bisect_left(times, end_s) - bisect_left(times, begin_s))


LONG = Shape(num_requests=36, interval_ms=0, num_prompt=24, max_tokens=44, block_tokens=16, slice_steps=3)
"""A burst in which the controls fail."""
