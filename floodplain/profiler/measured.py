"""A target whose answers are measured: an engine in this process, or a server over HTTP."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from floodplain.core.errors import UserError
from floodplain.profiler.goals import TryGoals
from floodplain.profiler.kv_use import ReadUse, wait_until_idle, watching
from floodplain.profiler.live_try import run_try
from floodplain.profiler.targets import Load, Seen
from floodplain.workload.client import run_load
from floodplain.workload.goals import NUM_SAMPLES, sample_requests
from floodplain.workload.prompts import PromptTokenizer
from floodplain.workload.records import LoadTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An opened target.

    Attributes:
        name: For errors.
        machine: The machine that it runs on.
        tokenizer: Of its model.
        target: Answers requests.
        read: Reads its KV use.
        look_s: Seconds between two reads.
    """

    name: str
    machine: str
    tokenizer: PromptTokenizer
    target: LoadTarget
    read: ReadUse
    look_s: float


class MeasuredTarget:
    """A ``Target`` in real time. Use it as a context manager, which opens and closes the engine or server.

    Args:
        opening: Opens it, on an event loop that is this object's own and that only runs during tries.
        load: The requests.
        goals: A try ends when they are out of reach.
    """

    is_virtual = False

    def __init__(self, opening: AbstractAsyncContextManager[Opened], load: Load, goals: TryGoals) -> None:
        self._opening = opening
        self._load = load
        self._goals = goals
        self._runner = asyncio.Runner()
        self._opened: Opened | None = None

    def __enter__(self) -> Self:
        """Open it, and send a few requests to warm it up.

        Raises:
            UserError: It cannot be opened, or answers none of them.
        """
        self._runner.__enter__()
        try:
            self._opened = self._runner.run(self._opening.__aenter__())
        except BaseException:
            self._runner.close()
            raise
        try:
            self._runner.run(self._warm_up())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the engine or server, and the event loop."""
        try:
            self._runner.run(self._opening.__aexit__(None, None, None))
        finally:
            self._runner.close()

    @property
    def machine(self) -> str:
        """Return the machine that the target runs on."""
        return self._ready.machine

    def run(self, rate: float, seed: int, duration_s: float) -> Seen:
        """Send the requests of one try to the idle target; return what was seen."""
        return self._runner.run(self._run(rate, seed, duration_s))

    @property
    def _ready(self) -> Opened:
        if self._opened is None:
            raise RuntimeError("enter MeasuredTarget (with) before use")
        return self._opened

    async def _warm_up(self) -> None:
        ready = self._ready
        samples = sample_requests(self._load.make(ready.tokenizer, 1.0, self._load.spec.seed, NUM_SAMPLES + 1.0))
        records = await run_load(ready.target, samples, progress=False)
        errors = [record.error for record in records if record.error is not None]
        if len(errors) == len(records):
            raise UserError(f"{ready.name} answers no request: {errors[0]}")

    async def _run(self, rate: float, seed: int, duration_s: float) -> Seen:
        ready = self._ready
        requests = self._load.make(ready.tokenizer, rate, seed, duration_s)
        await wait_until_idle(ready.read, ready.name)
        async with watching(ready.read, ready.look_s) as peak:
            answers, is_cut, error = await run_try(ready.target, requests, self._goals)
        return Seen(
            answers=answers,
            is_cut=is_cut,
            peak_kv_bytes=peak.used_bytes,
            kv_bytes=peak.pool_bytes,
            error=error,
        )
