"""Engines that lend, from start to end: no coordinator, a wrong token, neighbours that exit or stay, restarts."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from floodplain import LLM, SamplingParams
from floodplain.coordinator.tokens import TokenRing
from floodplain.core.errors import UserError
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.llm import IdleSteps
from floodplain.engine.shell import Engine
from floodplain.memory.host import named_file
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.policy.lending import LendingSettings
from floodplain.web.address import bind, url_of
from tests.support import forks
from tests.support.lending import QUICK, Consumer, Producer, Ticks, borrowing, coordinating
from tests.support.swapping import BLOCK_BYTES
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.slow

NUM_BLOCKS = 128
FLAGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "kv_memory": NUM_BLOCKS * BLOCK_BYTES, "swap": "none", "policy": "fcfs",
    "lend": "auto",
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
GPU = f"gpu{os.getpid()}"
"""A device is a file in /dev/shm: another suite on this machine has other names."""


@pytest.fixture(scope="module")
def coordinator() -> Iterator[str]:
    with coordinating() as url:
        yield url


def make_engine(url: str, **flags: Any) -> Engine:
    config = EngineConfig(model="dummy:tiny-llama", coordinator=url, **(FLAGS | flags))
    engine = build_engine(config, lending=QUICK)
    engine.clock = Ticks()
    return engine


def file_of(engine: Engine) -> Path:
    return Path(f"/dev/shm/floodplain-{engine.config.device_name}")


def test_without_a_coordinator_it_serves_warns_once_and_lends_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IdleSteps, "start", lambda self: None)  # only this test steps the engine
    sock = bind("127.0.0.1", 0)  # it listens later
    with LLM("dummy:tiny-llama", coordinator=url_of(sock), **FLAGS) as llm:
        producer = Producer(llm.engine)
        llm.engine.clock = Ticks()
        for _ in range(3):
            assert llm.generate("x", GREEDY, use_tqdm=False)[0].finished
            producer.wake()
        for _ in range(2000):
            llm.engine.step()
        assert producer.is_whole, "there was no borrower"
        warnings = [message for message in caplog.messages if "does not answer" in message]
        assert len(warnings) == 1 and "leases stay as they are for now" in warnings[0]
        with coordinating(sock=sock):
            producer.step_until(lambda: producer.num_blocks <= 16)
            assert llm.generate("x", GREEDY, use_tqdm=False)[0].finished


def test_a_wrong_token_is_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    secrets, mine = tmp_path / "tokens", tmp_path / "mine"
    for path, text in ((secrets, f"producer {GPU} right\n"), (mine, "wrong\n")):
        path.write_text(text)
        path.chmod(0o600)
    with coordinating(tokens=TokenRing.from_file(secrets)) as url:
        with pytest.raises(UserError, match=r"answers 401") as caught:
            make_engine(url, coordinator_token_file=str(mine), device_name=GPU)
        assert "\n" not in str(caught.value)
        assert not Path(f"/dev/shm/floodplain-{GPU}").exists()
        with pytest.raises(UserError, match="cannot read the coordinator token file"):
            make_engine(url, coordinator_token_file=str(tmp_path / "none"))
        mine.write_text("right\n")
        with closing(make_engine(url, coordinator_token_file=str(mine), device_name=GPU)) as engine:
            assert engine.neighbours is not None and engine.neighbours.agent.membership.has_joined
            with pytest.raises(UserError, match=f"floodplain-{GPU} is another engine's, which runs"):
                make_engine(url, coordinator_token_file=str(mine), device_name=GPU)
        assert not file_of(engine).exists()


def test_without_lending_or_a_device_name_no_device_is_shared(coordinator: str) -> None:
    with closing(make_engine(coordinator, lend="off")) as engine:
        assert engine.neighbours is not None and engine.neighbours.lender is None
        assert engine.config.device_name is not None, "the coordinator calls it something"
        assert not file_of(engine).exists()
        assert engine.stats().lease_bytes == {}
    with closing(make_engine(coordinator, lend="off", device_name=f"named.{GPU}")) as engine:
        assert file_of(engine).exists()
    assert not file_of(engine).exists()


def test_neighbours_keep_memory_of_a_closed_engine_and_the_next_recalls_it(
    coordinator: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_engine(coordinator, device_name=f"restarted-{GPU}")
    producer = Producer(first)
    device = producer.visit()
    with borrowing(Consumer(coordinator, device, 4 * PAGE_BYTES)) as consumer:
        producer.step_until(lambda: len(consumer.held) >= 3, consumer)
        first.close()
        first.close()
        assert file_of(first).exists() and device.num_owned_pages >= 12
        with pytest.raises(
            UserError, match=rf"^device .*/floodplain-restarted-{GPU} of an engine before has .* bytes, not"
        ):
            make_engine(coordinator, device_name=f"restarted-{GPU}", kv_memory=2 * FLAGS["kv_memory"])
        with closing(make_engine(coordinator, device_name=f"restarted-{GPU}")) as second:
            producer = Producer(second)
            assert second.loop.state.ledger.num_blocks == NUM_BLOCKS - 12 * 8
            assert any("begins with" in message for message in caplog.messages)
            producer.lend(0)
            producer.step_until(lambda: producer.is_whole, consumer)
            assert not consumer.held
            assert second.stats().num_failed_growths == 0
    assert not file_of(first).exists()


LENDER = """
import sys
from pathlib import Path
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.llm import IdleSteps
from floodplain.memory.host import named_file
named_file._default_directory = lambda: Path(sys.argv[2])
engine = build_engine(EngineConfig(model="dummy:tiny-llama", coordinator=sys.argv[1], lend="auto", kv_memory=2**20))
print(engine.config.device_name, flush=True)
sys.stdin.readline()
"""


def test_the_next_engine_removes_the_device_file_of_a_killed_one(
    coordinator: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(named_file, "_default_directory", lambda: tmp_path)  # no other test sweeps there
    command = [sys.executable, "-c", LENDER, coordinator, str(tmp_path)]
    with forks.Popen(command, stdin=-1, stdout=-1, env=os.environ | {"OMP_NUM_THREADS": "1"}) as child:
        assert child.stdout is not None
        name = child.stdout.readline().decode().strip()
        file = tmp_path / f"floodplain-{name}"
        with closing(make_engine(coordinator, lend="off")):
            assert file.exists(), "its engine lives"
        child.kill()
    assert file.exists() and file.stat().st_blocks * 512 >= 2**20
    with caplog.at_level("INFO", logger="floodplain"), closing(make_engine(coordinator, lend="off")):
        assert not file.exists()
        assert any(f"removed devices that killed engines left: {name}, " in message for message in caplog.messages)


def test_bytes_held_by_another_process_only_make_a_growth_fail(
    coordinator: str, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(make_engine(coordinator)) as engine, (producer := Producer(engine)).visit() as visitor:
        producer.step_until(lambda: producer.num_blocks <= 16)
        free = visitor.num_free_pages()
        pages = visitor.allocate(free)
        assert pages is not None
        producer.lend(0)
        end_s = time.monotonic() + HANG_S
        while engine.stats().num_failed_growths < 3 and time.monotonic() < end_s:
            engine.step()
            producer.wake()
        assert producer.num_blocks <= 16
        assert sum("others hold memory" in message for message in caplog.messages) == 1
        visitor.release(pages)
        producer.step_until(lambda: producer.is_whole)


KILLED = """
import sys, time
from floodplain.memory.host.device_file import PAGE_BYTES
from tests.support.host_devices import open_device
from tests.support.lending import Consumer
url, name, pages = sys.argv[1:]
consumer = Consumer(url, open_device(name, int(pages) * PAGE_BYTES), 4 * PAGE_BYTES, "mortal")
consumer.agent.start()
while len(consumer.held) < 2:
    consumer.turn()
    time.sleep(0.005)
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_killed_consumers_bytes_come_back_after_a_ttl() -> None:
    with coordinating(ttl_s=1.0) as url, closing(make_engine(url)) as engine:
        producer = Producer(engine)
        producer.step_until(lambda: producer.num_blocks <= 16)
        pages = str(producer.device.capacity_pages)
        command = [sys.executable, "-c", KILLED, url, str(engine.config.device_name), pages]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        with forks.Popen(command, stdin=-1, stdout=-1, env=environment) as child:
            try:
                assert child.stdout is not None and child.stdout.readline() == b"held\n"
                assert producer.pool.foreign_bytes >= 8 * PAGE_BYTES
            finally:
                child.send_signal(signal.SIGKILL)
        assert producer.pool.foreign_bytes == 0
        assert not producer.is_whole, "until the coordinator has taken it for dead"
        producer.lend(0)
        producer.step_until(lambda: producer.is_whole)
        assert engine.stats().lease_bytes == {}


async def test_an_engine_lends_while_it_has_nothing_to_do(coordinator: str) -> None:
    """Its thread does not sleep between two boundaries while memory moves."""
    hasty = LendingSettings(calm_s=0.01, busy_s=0.005, window_s=0.05, rate_window_s=0.02, rise_sigmas=1e9)
    config = EngineConfig(model="dummy:tiny-llama", coordinator=coordinator, **FLAGS)
    engine = AsyncEngine(build_engine(config, lending=hasty))
    producer, is_lent = Producer(engine.engine), threading.Event()
    producer.pool._step_blocks, rests_s = 16, list[float]()
    give_way = producer.pool.give_way

    def note(to_bytes: int) -> None:
        rests_s.append(engine.engine.rest_s)  # before this boundary
        give_way(to_bytes)
        if producer.num_blocks <= 16:
            is_lent.set()

    producer.pool.give_way = note  # type: ignore[method-assign]
    await engine.start()
    assert await asyncio.to_thread(is_lent.wait, HANG_S)
    await engine.close()
    assert len(rests_s) == 7 and rests_s[1:] == [0.0] * 6, "seven quanta, one at a boundary"
    assert producer.num_blocks == 16
