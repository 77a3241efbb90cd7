from __future__ import annotations

from dataclasses import replace

import pytest

from floodplain.engine.outputs import EngineStats
from floodplain.server.status import STATUS_S, StatusLine

LOADED = EngineStats(
    num_running=12, num_waiting=3, num_swapped=4, num_blocks=200, num_used_blocks=174, num_prompt_tokens=12030,
    num_generated_tokens=4562,
    swap_bytes={("out", "host"): 100 * 2**20, ("out", "peer"): 50 * 2**20, ("in", "host"): 2**20},
)  # fmt: skip


class Server:
    """Statistics and a clock, which tests set."""

    def __init__(self) -> None:
        self.now_s = 500.0
        self.stats = EngineStats(num_blocks=200)
        self._line = StatusLine(lambda: self.stats, lambda: self.now_s)

    def look(self, after_s: float, stats: EngineStats | None = None) -> str | None:
        self.now_s += after_s
        self.stats = stats or self.stats
        return self._line.look()


def test_a_line_has_gauges_and_rates_since_the_last_look() -> None:
    server = Server()
    assert server.look(10.0, LOADED) == (
        "12 running, 3 waiting, 4 swapped; KV 87%; 1203.0 prompt and 456.2 generated tokens/s; "
        "swap 15 MiB/s out, 102.4 KiB/s in"
    )
    later = replace(LOADED, num_prompt_tokens=12130, num_generated_tokens=4612)
    line = server.look(20.0, later)
    assert line is not None and "; 5.0 prompt and 2.5 generated tokens/s; swap 0 bytes/s out, 0 bytes/s in" in line


@pytest.mark.parametrize("gauge", ["num_running", "num_waiting", "num_swapped"])
def test_a_live_request_is_load_even_if_nothing_is_computed(gauge: str) -> None:
    server = Server()
    stuck = replace(server.stats, **{gauge: 1})
    assert server.look(STATUS_S, stuck) and server.look(STATUS_S)


def test_load_that_ended_between_two_looks_has_one_line() -> None:
    server = Server()
    ended = replace(server.stats, num_prompt_tokens=7, num_generated_tokens=9)
    line = server.look(STATUS_S, ended)
    assert line is not None and line.startswith("0 running, 0 waiting, 0 swapped; KV 0%; 0.7 prompt and 0.9 generated")
    assert server.look(STATUS_S) is None


@pytest.mark.parametrize("counter", ["num_prompt_tokens", "num_generated_tokens"])
def test_either_kind_of_tokens_is_load(counter: str) -> None:
    assert Server().look(STATUS_S, EngineStats(num_blocks=200, **{counter: 5}))


def test_an_idle_server_is_silent_and_its_idle_time_is_in_no_rate() -> None:
    server = Server()
    assert [server.look(STATUS_S) for _ in range(5)] == [None] * 5
    line = server.look(STATUS_S, LOADED)
    assert line is not None and "; 1203.0 prompt and 456.2 generated tokens/s" in line


def test_lines_are_ten_seconds_apart() -> None:
    server = Server()
    server.look(0.0, LOADED)
    lines = [server.look(1.0) for _ in range(30)]
    assert [second for second, line in enumerate(lines, start=1) if line is not None] == [10, 20, 30]


def test_counters_of_lost_instances_give_no_negative_rate() -> None:
    server = Server()
    server.look(STATUS_S, LOADED)
    line = server.look(STATUS_S, EngineStats(num_running=1))
    assert line is not None and "-" not in line and "KV 0%" in line
