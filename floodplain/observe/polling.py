"""Polls something while a block of code runs; parses the Prometheus metrics of any server."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from floodplain.core.errors import UserError
from floodplain.files.parsing import parsing


@asynccontextmanager
async def polling(look: Callable[[], Awaitable[None]], period_s: float) -> AsyncIterator[None]:
    """Call ``look`` before the context begins and ``period_s`` after each call; its exception ends the context."""

    async def look_often() -> None:
        while True:
            await asyncio.sleep(period_s)
            await look()

    await look()

    task = asyncio.create_task(look_often())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


MAX_LINE = 2**16
"""Most characters of a line: parsing time is quadratic in its labels."""


class Scraped:
    """The samples of an answer of ``/metrics`` by their names, without ``prefix``. Raises UserError for other text."""

    def __init__(self, text: str, prefix: str = "") -> None:
        from prometheus_client.parser import text_string_to_metric_families

        if max(map(len, text.split("\n"))) > MAX_LINE:
            raise UserError(f"a line of its /metrics has more than {MAX_LINE} letters")
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        with parsing("its /metrics", "no metrics for Prometheus"):
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    self._samples[sample.name.removeprefix(prefix)].append((sample.labels, sample.value))

    def __contains__(self, name: str) -> bool:
        return bool(self._samples.get(name))

    def samples(self, name: str) -> Sequence[tuple[Mapping[str, str], float]]:
        """(labels, value) of each sample of a name; empty if there is none."""
        return self._samples.get(name, ())

    def sum(self, name: str, **labels: str) -> float:
        """The sum of a name's samples that have these labels. Raises UserError if it is NaN or infinite."""
        return _finite(name, sum(value for found, value in self.samples(name) if labels.items() <= found.items()))

    def by(self, name: str, label: str) -> Iterator[tuple[str, float]]:
        """(the label's value, or empty, value) of each sample of a name. Raises UserError for NaN and infinity."""
        return ((found.get(label, ""), _finite(name, value)) for found, value in self.samples(name))


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise UserError(f"its /metrics say {value} of {name}")
    return value
