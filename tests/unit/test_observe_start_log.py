from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from floodplain.observe.start_log import PROGRESS, StartLog
from floodplain.observe.terminal import CLEAR_LINE, PLAIN_S, REDRAW_S, ProgressHandler


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class Log:
    """A logger over one handler, with the time of each entry given."""

    def __init__(self, stream: io.StringIO) -> None:
        self.stream = stream
        self._handler = ProgressHandler(stream)

    def write(self, level: int, message: str, at_s: float) -> None:
        record = logging.LogRecord("floodplain.x", level, "", 0, message, (), None)
        record.created = 1000.0 + at_s
        self._handler.handle(record)

    @property
    def lines(self) -> list[str]:
        return [line.split(": ", 1)[1] for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def entries(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(PROGRESS, "floodplain"):
        yield caplog


def test_steps_have_the_time_since_the_start(entries: pytest.LogCaptureFixture) -> None:
    times = iter([10.0, 10.0, 11.5, 13.0, 25.25])
    start_log = StartLog(logging.INFO, lambda: next(times))
    start_log.begin("opening the model m")
    start_log.begin("reading 2 GiB of weights")
    start_log.note_bytes(2**29, 2**31)
    start_log.end()
    assert [(record.levelno, record.getMessage()) for record in entries.records] == [
        (logging.INFO, "starting, 0.0 s: opening the model m"),
        (logging.INFO, "starting, 1.5 s: reading 2 GiB of weights"),
        (PROGRESS, "starting, 3.0 s: reading 2 GiB of weights, 512 MiB read (25%)"),
        (logging.INFO, "started in 15.2 s"),
    ]


def test_a_model_without_weights_has_progress(entries: pytest.LogCaptureFixture) -> None:
    StartLog().note_bytes(0, 0)
    assert entries.messages[-1].endswith("0 bytes read (0%)")


def test_a_file_gets_progress_only_after_a_silence() -> None:
    log = Log(io.StringIO())
    log.write(logging.INFO, "begin", 0.0)
    for tenth in range(200):
        log.write(PROGRESS, f"{tenth / 10} s", tenth / 10)
    assert log.lines == ["begin", *(f"{PLAIN_S * number} s" for number in (1, 2, 3))]
    assert "INFO floodplain.x: 5.0 s" in log.stream.getvalue()


def test_other_entries_are_all_written_and_put_progress_off() -> None:
    log = Log(io.StringIO())
    for second in range(4):
        log.write(logging.INFO, f"{second}", second)
        log.write(logging.WARNING, f"{second} again", second)
    log.write(PROGRESS, "soon", 3.0 + PLAIN_S - 0.1)
    log.write(PROGRESS, "now", 3.0 + PLAIN_S)
    assert log.lines == [word for second in range(4) for word in (f"{second}", f"{second} again")] + ["now"]


def test_a_terminal_shows_the_last_progress_until_the_next_line() -> None:
    log = Log(Screen())
    log.write(PROGRESS, "10%", 0.0)
    log.write(PROGRESS, "11%", REDRAW_S / 2)
    log.write(PROGRESS, "20%", REDRAW_S)
    log.write(logging.INFO, "done", REDRAW_S)
    log.write(logging.INFO, "more", REDRAW_S)
    first, second, _ = log.stream.getvalue().split("\n")  # splitlines would split at \r, too
    assert first.startswith(f"10%{CLEAR_LINE}20%{CLEAR_LINE}") and first.endswith("INFO floodplain.x: done")
    assert CLEAR_LINE not in second


def test_steps_of_an_engine_within_another_command_are_few(entries: pytest.LogCaptureFixture) -> None:
    start_log = StartLog()
    start_log.begin("opening the model m")
    start_log.end()
    assert [record.levelno for record in entries.records] == [PROGRESS, PROGRESS]
