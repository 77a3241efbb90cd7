"""A cluster's arrival rate and step time, learned from the reports of its instances. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from floodplain.cost.relief import StreamStep
from floodplain.policy.drop_timing import find_slope

MOST_SAMPLES = 600
"""Most intervals, of all instances, from which a step's time is learned: a minute of two instances."""

BLIND_BASE = 0.5
"""Assumed part of a step's time that does not depend on streams, while all steps seen have about one size."""

LEAST_SPREAD, LEAST_SAMPLES = 1.5, 20
"""Least ratio of most to fewest streams, and least number of samples, for a line through the samples."""

RECENT_S, LONG_S = 5.0, 120.0
"""Windows for arrivals now, and in the long run."""

MOST_ARRIVALS = 10_000
FIRST_OUTPUT_TOKENS = 128.0
"""Assumed output tokens of a request while none has ended."""

FORGETTING = 0.05
"""Weight of the last request's output in the mean."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Counters of an instance at one moment.

    Attributes:
        now: Seconds of any monotonic clock.
        num_steps: Since its start, and
        num_tokens: output tokens of these.
        num_running: Requests in memory.
    """

    now: float
    num_steps: int
    num_tokens: int
    num_running: int


class StepMeter:
    """Learns the time of a step from the differences of two reports between which an instance was busy."""

    def __init__(self) -> None:
        self._last: dict[int, Progress] = {}
        self._samples: deque[tuple[float, float]] = deque(maxlen=MOST_SAMPLES)

    def note(self, instance: int, progress: Progress) -> None:
        """Add a report. If counters fell, the instance was restarted: the report only starts a new interval."""
        last = self._last.get(instance)
        self._last[instance] = progress
        if last is None or not (last.num_running and progress.num_running):
            return
        num_steps, num_tokens = progress.num_steps - last.num_steps, progress.num_tokens - last.num_tokens
        if num_steps > 0 and num_tokens > 0:
            self._samples.append((num_tokens / num_steps, (progress.now - last.now) / num_steps))

    def forget(self, instance: int) -> None:
        """Drop the last report of an instance that has ended or joined a group."""
        self._last.pop(instance, None)

    def step(self) -> StreamStep | None:
        """The time of a step as a function of its streams; None without samples."""
        if not self._samples:
            return None
        streams = [one for one, _ in self._samples]
        mean_streams = sum(streams) / len(streams)
        mean_s = sum(seconds for _, seconds in self._samples) / len(self._samples)
        token_s = (1 - BLIND_BASE) * mean_s / mean_streams
        if len(streams) >= LEAST_SAMPLES and max(streams) >= LEAST_SPREAD * min(streams):
            token_s = min(max(0.0, find_slope(self._samples)), mean_s / mean_streams)
        return StreamStep(base_s=mean_s - token_s * mean_streams, token_s=token_s)


class ArrivalMeter:
    """Learns the arrival rate of requests, in output tokens per second."""

    def __init__(self) -> None:
        self.output_tokens = FIRST_OUTPUT_TOKENS
        """Mean output tokens of recently ended requests."""
        self._arrivals: deque[float] = deque(maxlen=MOST_ARRIVALS)
        self._begun_s: float | None = None

    def note_arrival(self, now: float) -> None:
        """Count an arrival."""
        self._begun_s = now if self._begun_s is None else self._begun_s
        self._arrivals.append(now)

    def note_end(self, num_output_tokens: int) -> None:
        """Learn from the output of a request that ended."""
        self.output_tokens += FORGETTING * (num_output_tokens - self.output_tokens)

    def tokens_per_s(self, now: float, window_s: float) -> float:
        """Output tokens that arrived per second in the last ``window_s``, or since the first request."""
        seen_s = min(window_s, now - (now if self._begun_s is None else self._begun_s))
        count = sum(arrival > now - window_s for arrival in self._arrivals)
        return count / max(seen_s, 1.0) * self.output_tokens
