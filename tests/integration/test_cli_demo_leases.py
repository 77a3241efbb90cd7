"""The demo's second part with a model of random weights, in three real processes."""

from __future__ import annotations

import asyncio
import math
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from floodplain.core.errors import UserError
from floodplain.demo import leases
from floodplain.demo.cluster import Neighbourhood, VerbProcess, neighbourhood, split_cores
from floodplain.demo.leases import QUICK_SCENE, describe, serve_scene
from floodplain.demo.users import Users
from floodplain.demo.watch import LendingSample, watching
from floodplain.engine.config import EngineConfig
from floodplain.model.tokenizer import ByteTokenizer
from floodplain.observe.demo_plots import draw_lending
from floodplain.observe.plots import to_svg
from floodplain.workload.http_target import HttpTarget
from floodplain.workload.records import LoadRequest, RequestRecord
from floodplain.workload.spec import WorkloadSpec, build
from tests.support import forks
from tests.support.records import make_record

BASE = EngineConfig(
    model="dummy:tiny-llama", policy="fcfs", swap="none", dtype="float32", kv_memory=2**19, max_model_len=128
)
SAMPLE = WorkloadSpec(num_prompts=60, max_input=40, max_output=64, ignore_eos=True)
SCENE = replace(QUICK_SCENE, lend_after_s=0.5, end_s=100.0)
"""``Patient`` ends this scene; ``end_s`` matters only if it hangs."""

TARGET = HttpTarget("http://a", "m")


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork verbs, which saves the seconds of their imports."""
    monkeypatch.setattr(subprocess, "Popen", forks.Popen)


class Patient(Users):
    """Its users wait for events: the crowd sends once memory is lent; its first answer ends all users."""

    samples: ClassVar[list[LendingSample]]
    is_over: ClassVar[bool]

    async def visit(self, num_users: int, from_s: float, to_s: float = math.inf) -> None:
        is_crowd = to_s < math.inf
        while is_crowd and not (self.samples and self.samples[-1].lent_bytes):
            await asyncio.sleep(0.02)

        async def use() -> None:
            while not Patient.is_over:
                self.records.append(await self.send(next(self._requests)))
                Patient.is_over = Patient.is_over or is_crowd

        await asyncio.gather(*(use() for _ in range(num_users)))


def test_memory_is_lent_while_both_servers_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def seen(*urls: str) -> AsyncIterator[list[LendingSample]]:
        async with watching(*urls) as Patient.samples:
            yield Patient.samples

    monkeypatch.setattr(leases, "Users", Patient)
    monkeypatch.setattr(leases, "watching", seen)
    Patient.samples, Patient.is_over = [], False
    told = serve_scene(BASE, SAMPLE, SCENE, num_resident=SCENE.num_resident, progress=False)
    samples = told["samples"]
    assert told["failed"] == 0 and told["completed"] > SCENE.num_lender_users
    assert told["most_lent_bytes"] > 0
    assert samples["num_tokens"][-1] > samples["num_tokens"][0]
    assert max(samples["pool_bytes"]) > min(samples["pool_bytes"]), "the lender gave way"
    assert samples["time_s"][-1] < SCENE.end_s
    assert any("MiB were lent" in text for text in describe(told))
    end_s = samples["time_s"][-1]
    told["scene"] |= {"double_s": end_s / 2, "light_s": end_s}  # the times of the scene before events ended it
    picture = to_svg(draw_lending(told, "tiny on something"))
    assert all(text in picture for text in (">in use<", ">lent<", ">borrowed<", ">doubled<"))


@pytest.mark.parametrize("end_s, error", [(0.01, None), (100.0, UserError("it hung up"))])
def test_users_leave_when_the_scene_is_over_or_one_of_them_fails(
    end_s: float, error: UserError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_here = num_gone = 0

    class Idle(Users):
        async def warm_up(self) -> None:
            pass

        async def visit(self, num_users: int, from_s: float, to_s: float = math.inf) -> None:
            nonlocal num_here, num_gone
            num_here += 1
            try:
                if error is not None and num_here == 3:
                    raise error
                await asyncio.Event().wait()
            finally:
                num_gone += 1

    @asynccontextmanager
    async def seen(*_: str) -> AsyncIterator[list[LendingSample]]:
        yield []

    monkeypatch.setattr(leases, "watching", seen)
    play = leases._play(Neighbourhood("c", "a", "b"), Idle(TARGET, []), Idle(TARGET, []), replace(SCENE, end_s=end_s))
    with nullcontext() if error is None else pytest.raises(UserError, match="it hung up"):
        assert asyncio.run(play) == []
    assert (num_here, num_gone) == (3, 3)


@pytest.mark.parametrize("to_s, goes_on", [(-1.0, False), (math.inf, True)])
def test_users_ask_again_when_they_are_answered_until_they_leave(to_s: float, goes_on: bool) -> None:
    num_sent = 0

    class Quick(Users):
        async def send(self, request: LoadRequest) -> RequestRecord:
            nonlocal num_sent
            num_sent += 1
            await asyncio.sleep(0)
            if num_sent == 10:
                raise UserError("enough")
            return make_record(0.5)

    visit = Quick(TARGET, build(SAMPLE, ByteTokenizer(256))).visit(3, 0.0, to_s)
    with pytest.raises(UserError, match="enough") if goes_on else nullcontext():
        asyncio.run(visit)
    assert num_sent == (10 if goes_on else 0)


def test_a_verb_that_does_not_start_reports_the_reason(tmp_path: Path) -> None:
    flags = ["--lend", "auto"]
    with pytest.raises(UserError, match=r"serve did not start: .*no-such-model"):  # noqa: SIM117
        with neighbourhood(tmp_path, "no-such-model", flags, ["--swap", "peer"]):
            pytest.fail("it started")


def test_a_process_stops_on_request(tmp_path: Path) -> None:
    words = ["coordinator", "--port", "0", "--store", f"sqlite:///{tmp_path / 'a.db'}"]
    with VerbProcess(words, tmp_path / "log") as process:
        assert str(process.wait_ready()["url"]).startswith("http://127.0.0.1:")
        process.ask_to_stop()
        process.stop()
        assert process._process.returncode == 0
    with (
        VerbProcess(["serve", "--no-such-flag"], tmp_path / "log") as process,
        pytest.raises(UserError, match="no-such"),
    ):
        process.wait_ready()


def test_the_servers_share_no_core() -> None:
    near, far = split_cores()
    if near is None or far is None:
        pytest.skip("one core, or a system that does not say")
    assert len(near) == len(far) >= 1
    assert not set(near) & set(far)
