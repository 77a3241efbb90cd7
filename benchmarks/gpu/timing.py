"""Rows of a result, and the two clocks: the device's own for its work, the host's for what a caller waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

NUM_WARMUP, NUM_REPEATS = 10, 50
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: the median, the 10th and 90th percentile, and what the device allows, all in ``unit``.

    ``reached`` is 1.0 at the bound and smaller before it, for times and rates alike. ``copy_bytes`` is the size of each
    copy where that is what is varied.
    """

    name: str
    unit: str
    median: float
    low: float
    high: float
    num_samples: int
    bound: float | None = None
    reached: float | None = None
    copy_bytes: int | None = None

    def __str__(self) -> str:
        text = f"{self.name:44s} {self.median:10.4g} {self.low:10.4g} {self.high:10.4g}"
        bound = "" if self.bound is None else f"{self.bound:10.4g}"
        reached = "" if self.reached is None else f"{self.reached:7.1%}"
        return f"{text} {self.unit:9s} {bound:>10s} {reached:>8s}"


HEADER = f"{'':44s} {'median':>10s} {'p10':>10s} {'p90':>10s} {'':9s} {'bound':>10s} {'reached':>8s}"


def time_row(name: str, samples_s: Sequence[float], floor_s: float | None = None) -> Row:
    """A row in milliseconds."""
    low, median, high = (float(sample_s) * 1e3 for sample_s in np.percentile(samples_s, (10, 50, 90)))
    if floor_s is None:
        return Row(name, "ms", median, low, high, len(samples_s))
    return Row(name, "ms", median, low, high, len(samples_s), floor_s * 1e3, floor_s * 1e3 / median)


def rate_row(name: str, unit: str, amount: float, samples_s: Sequence[float], ceiling: float | None = None) -> Row:
    """A row in ``unit``, of which each sample did ``amount``."""
    low, median, high = (amount / float(sample_s) for sample_s in np.percentile(samples_s, (90, 50, 10)))
    return Row(name, unit, median, low, high, len(samples_s), ceiling, None if ceiling is None else median / ceiling)


def time_on_device(call: Callable[..., object], *args: Any) -> list[float]:
    """Seconds of the device's clock for each of many calls, after a warm-up."""
    for _ in range(NUM_WARMUP):
        call(*args)
    events = []
    for _ in range(NUM_REPEATS):
        begin, end = make_events()
        begin.record()
        call(*args)
        end.record()
        events.append((begin, end))
    return read_events(events)


def time_on_host(samples_s: list[float], call: Callable[..., T], *args: Any) -> T:
    """What a call returns; its seconds, from an idle device to an idle device, go into the list."""
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    result = call(*args)
    torch.cuda.synchronize()
    samples_s.append(time.perf_counter() - begin_s)
    return result


def make_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """A beginning and an end."""
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def read_events(events: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
    """Seconds between the events of each pair, once the device has passed them."""
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]
