"""``floodplain serve`` as a process of its own, with a fake engine in the real one's place."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.waiting import HANG_S

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, types
from floodplain.cli.main import main
from tests.fakes.engine import FakeEngine

class AsyncEngine:
    @staticmethod
    def from_config(config, start_log):
        assert (config.policy, config.swap) == ("timely", "host")
        return FakeEngine(num_free_tokens=100)

sys.modules["floodplain.engine.async_engine"] = types.SimpleNamespace(AsyncEngine=AsyncEngine)
sys.exit(main())
"""


def start(*argv: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "serve", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environ},
    )


@contextmanager
def served(*argv: str, **environ: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(the process, the line that reports that it is ready)."""
    with start(*argv, "--port", "0", **environ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline()
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_requests_end_and_exits_0(number: signal.Signals) -> None:
    with served("smollm2", "--format", "json", "--access-log") as (process, line):
        ready = json.loads(line)
        body = {"model": ready["model"], "prompt": "abc", "max_tokens": 100, "stream": True}
        with httpx.stream("POST", f"{ready['url']}/v1/completions", json=body) as answer:
            events = answer.iter_raw()
            next(events)
            process.send_signal(number)
            assert b"".join(events).endswith(b"data: [DONE]\n\n")
        assert process.wait(HANG_S) == 0
        assert process.stderr is not None
        log = process.stderr.read()
    assert log.count('"drain_timeout": ') == 1  # the server logs its configuration once
    assert "Traceback" not in log
    said = re.findall(r"(?m)^\S+ \S+ INFO floodplain\S+: (.+?)(?: in|,| after)? \d+\.\d+ s(.*)$", log)
    assert said[:2] == [("starting", ": importing PyTorch and the server"), ("started", "")]
    assert ("POST /v1/completions 200", "") in said


@pytest.mark.parametrize("flags", [[], ["-q"]])
def test_requests_that_do_not_end_are_cut_off_and_the_exit_is_still_0(flags: list[str]) -> None:
    with served("smollm2", *flags, FLOODPLAIN_DRAIN_TIMEOUT="0.05") as (process, line):
        body = {"model": "fake", "prompt": "abc", "max_tokens": 1000, "stream": True}
        with httpx.stream("POST", f"{line.split()[-1]}/v1/completions", json=body) as answer:
            events = answer.iter_raw()
            next(events)
            process.send_signal(signal.SIGTERM)
            assert b'"code": "aborted"' in b"".join(events)
        assert process.wait(HANG_S) == 0
        assert process.stderr is not None
        log = process.stderr.read()
    if flags:
        assert log == ""
    else:
        assert "stopping: 1 request may finish within 0.05 s; a second signal aborts it\n" in log
        assert re.search(r"stopped after \d+\.\d s: 1 request aborted\n", log)
        assert "/v1/completions" not in log  # --access-log is off by default


def test_a_port_in_use_is_one_line_and_status_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with start("m", "--port", str(port)) as process:
            out, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, out) == (2, "")
    assert err.startswith(f"floodplain: cannot listen on 127.0.0.1:{port} (Address already in use)")
    assert err.count("\n") == 1
