"""Finds the batch at which a callable's throughput saturates, and its memory there (AQUA, section 4)."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from io import IOBase
from pathlib import Path
from statistics import median

import torch

from floodplain.core.errors import UserError
from floodplain.core.flags import check_between
from floodplain.core.quantiles import quantile
from floodplain.core.sizes import show_size
from floodplain.files.parsing import reason_of
from floodplain.profiler.knee import Knee, KneeSettings, find_knee, next_batch
from floodplain.profiler.meters import MemoryMeter

logger = logging.getLogger(__name__)

MOST_RUNS = 100
FITS, OUT_OF_MEMORY, NOT_TRIED = "fits", "out of memory", "not tried: would be out of memory"
_SIGNS_OF_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSettings:
    """How a callable is measured: runs that warm up, the least number of timed runs, and the least seconds of these.

    The median of the timed runs counts. Raises UserError if a value is out of its range.
    """

    knee: KneeSettings
    warmup: int = 1
    repeats: int = 3
    min_seconds: float = 0.2

    def __post_init__(self) -> None:
        check_between(self, "warmup", 0, MOST_RUNS)
        check_between(self, "repeats", 1, MOST_RUNS)
        check_between(self, "min_seconds", 0, 3600)


@dataclass(frozen=True, slots=True)
class BatchTry:
    """The measurement of one batch; without values if its verdict is ``OUT_OF_MEMORY`` or ``NOT_TRIED``.

    Throughput is in items per second by the median run; the spread is the distance of the quartiles of the runs' times
    as a part of the median.
    """

    batch: int
    verdict: str
    throughput: float | None = None
    spread: float | None = None
    peak_bytes: int | None = None
    free_bytes: int | None = None
    num_runs: int = 0


@dataclass(frozen=True, slots=True)
class MediaFindings:
    """Where throughput saturates, the try of that batch, and all tries in their order."""

    knee: Knee
    at_knee: BatchTry
    tries: tuple[BatchTry, ...]


def profile_media(
    run: Callable[[int], object],
    meter: MemoryMeter,
    settings: MediaSettings,
    clock: Callable[[], float] = time.perf_counter,
) -> MediaFindings:
    """Measure a callable, which computes a batch of a given size, at the batches that lead to its knee.

    Raises UserError if a batch fails for another reason than memory, or does not fit even with one item.
    """
    tries: dict[int, BatchTry] = {}
    while (batch := next_batch({b: each.throughput for b, each in tries.items()}, settings.knee)) is not None:
        if meter.is_fatal and expected_bytes(tries.values(), batch) > meter.total_bytes:
            tries[batch] = BatchTry(batch, NOT_TRIED)
        else:
            tries[batch] = _try_batch(run, batch, meter, settings, clock)
        _log(tries[batch])
    knee = find_knee({b: each.throughput for b, each in tries.items()}, settings.knee)
    if knee is None:
        raise UserError(f"a batch of one does not fit into {show_size(meter.total_bytes)}: there is nothing to profile")
    findings = MediaFindings(knee, tries[knee.batch], tuple(tries.values()))
    _warn(findings, settings.knee)
    return findings


def expected_bytes(tries: Iterable[BatchTry], batch: int) -> float:
    """The memory of a batch, extrapolated from the two largest that ran; 0 if fewer than two did."""
    ran = sorted((each.batch, each.peak_bytes) for each in tries if each.peak_bytes is not None)
    if len(ran) < 2:
        return 0.0
    (batch_a, peak_a), (batch_b, peak_b) = ran[-2:]
    return peak_b + max(0.0, (peak_b - peak_a) / (batch_b - batch_a)) * (batch - batch_b)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory is missing, on a GPU or on the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS_OF_NO_MEMORY)


def _try_batch(
    run: Callable[[int], object], batch: int, meter: MemoryMeter, settings: MediaSettings, clock: Callable[[], float]
) -> BatchTry:
    meter.begin()
    times_s: list[float] = []
    try:
        for _ in range(settings.warmup):
            _refuse_unfinished(run(batch))
            meter.settle()
        while len(times_s) < settings.repeats or (sum(times_s) < settings.min_seconds and len(times_s) < MOST_RUNS):
            begin_s = clock()
            result = run(batch)
            meter.settle()
            times_s.append(clock() - begin_s)
            _refuse_unfinished(result)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, too: the process would end without a message
        if is_out_of_memory(error):
            return BatchTry(batch, OUT_OF_MEMORY)
        raise UserError(f"a batch of {batch} fails: {reason_of(error)} ({_place(error)})") from error
    peak_bytes = meter.peak_bytes()
    if peak_bytes > meter.total_bytes:
        return BatchTry(batch, OUT_OF_MEMORY)
    middle_s = max(median(times_s), 1e-9)
    return BatchTry(
        batch, FITS, batch / middle_s, _spread(times_s), peak_bytes, meter.total_bytes - peak_bytes, len(times_s)
    )


def _refuse_unfinished(result: object) -> None:
    """Refuse a result that is returned before its work is done: then the work was not timed."""
    lazy = isinstance(result, Awaitable | AsyncIterator | Iterator | Future) and not isinstance(result, IOBase)
    if not lazy:
        return
    if isinstance(result, Coroutine):
        result.close()  # Python would warn that it was never awaited
    raise UserError(
        f"what is measured returns a {type(result).__name__} before its work is done: "
        "give a function that returns when it is"
    )


def _spread(times_s: list[float]) -> float | None:
    if len(times_s) < 2:
        return None
    low_s, middle_s, high_s = (quantile(times_s, part) for part in (0.25, 0.5, 0.75))
    return (high_s - low_s) / max(middle_s, 1e-9)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}"


def _warn(findings: MediaFindings, settings: KneeSettings) -> None:
    spread = findings.at_knee.spread
    if spread is not None and spread > settings.tolerance:
        logger.warning(
            "runs of a batch of %d spread by %.0f %%, more than the tolerance of %.0f %%: raise --repeats",
            findings.knee.batch, 100 * spread, 100 * settings.tolerance,
        )  # fmt: skip
    if not findings.knee.is_saturated:
        logger.warning("throughput was still growing at the largest batch that fits or is allowed")


def _log(each: BatchTry) -> None:
    if each.verdict != FITS:
        logger.info("a batch of %d: %s", each.batch, each.verdict)
        return
    assert each.peak_bytes is not None and each.free_bytes is not None
    logger.info(
        "a batch of %d: %.4g items/s, peak %.3g GB, free %.3g GB",
        each.batch, each.throughput, each.peak_bytes / 1e9, each.free_bytes / 1e9,
    )  # fmt: skip
