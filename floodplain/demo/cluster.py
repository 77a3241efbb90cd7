"""Runs verbs as processes, and the processes of the demo's second part: a coordinator and two servers."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from floodplain.core.errors import UserError

_VERB = "import sys; from floodplain.cli.main import main; sys.exit(main())"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0


class VerbProcess:
    """Runs ``floodplain VERB …`` in a child process, its standard error in ``log``; the end of the context ends it.

    It and its children have ``num_threads`` compute threads, by default as many as ``cores``; without both the system
    decides.
    """

    def __init__(
        self, words: Sequence[str], log: Path, cores: Sequence[int] | None = None, *, num_threads: int | None = None
    ) -> None:
        self._words = tuple(words)
        self._log = log
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        if num_threads or cores:
            environment["OMP_NUM_THREADS"] = str(num_threads or len(cores or ()))
        with _bound_to(cores), log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _VERB, *words, "--format", "json"],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
            )

    def wait_ready(self) -> Mapping[str, Any]:
        """Wait until the verb serves; return the JSON object that it prints, with its ``url``.

        UserError, with the last line of its log, if it ended, or was not ready in time.
        """
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            is_there = selector.select(START_TIMEOUT_S)
        line = self._process.stdout.readline() if is_there else b""
        if not line:
            raise UserError(f"floodplain {self._words[0]} did not start: {self._last_word()}")
        return dict(json.loads(line))

    def ask_to_stop(self) -> None:
        """Send SIGTERM, as an operator would, without waiting."""
        if self._process.poll() is None:
            self._process.terminate()

    def stop(self) -> None:
        """Send SIGTERM, wait, and kill it after ``STOP_TIMEOUT_S``. Safe to call twice."""
        self.ask_to_stop()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _last_word(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else f"it said nothing for {START_TIMEOUT_S:g} s"


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """Addresses of a coordinator and of two servers that use it: the producer lends, the consumer borrows."""

    coordinator: str
    producer: str
    consumer: str


@contextmanager
def neighbourhood(
    folder: Path, model: str, producer_flags: Sequence[str], consumer_flags: Sequence[str]
) -> Iterator[Neighbourhood]:
    """Run a coordinator and two servers of a model, each server on its own cores. All end with the context.

    Flags are those of ``floodplain serve``. The coordinator's store and all logs are in ``folder``. Raises UserError if
    one of the processes does not start.
    """
    near, far = split_cores()
    with ExitStack() as processes:

        def start(name: str, words: Sequence[str], cores: Sequence[int] | None = None) -> VerbProcess:
            return processes.enter_context(VerbProcess(words, folder / f"{name}.log", cores))

        store = f"sqlite:///{folder / 'leases.db'}"
        coordinator = start("coordinator", ["coordinator", "--port", "0", "--store", store])
        url = str(coordinator.wait_ready()["url"])
        serve = ["serve", model, "--port", "0", "--coordinator", url]
        producer = start("producer", [*serve, *producer_flags], near)
        consumer = start("consumer", [*serve, *consumer_flags], far)
        yield Neighbourhood(url, *(str(process.wait_ready()["url"]) for process in (producer, consumer)))
        for process in (producer, consumer):  # both at once, and before the coordinator
            process.ask_to_stop()


def split_cores() -> tuple[list[int] | None, list[int] | None]:
    """Two halves of the cores of this process; None if it has one core, or the system has no such call."""
    if not hasattr(os, "sched_getaffinity"):
        return None, None
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    return (cores[:half], cores[half : 2 * half]) if half else (None, None)


@contextmanager
def _bound_to(cores: Sequence[int] | None) -> Iterator[None]:
    """Bind this thread to cores for a while, which children started meanwhile inherit."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
