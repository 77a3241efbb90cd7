"""``--lend auto --profile FILE``: an engine lends from its first boundaries on what its profile leaves."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from floodplain.core.errors import UserError
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.shell import Engine
from floodplain.files.profile import Profile
from tests.support.lending import Producer, Ticks, coordinating
from tests.support.swapping import BLOCK_BYTES
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.slow

NUM_BLOCKS = 256


def write_profile(folder: Path, kind: str = "llm", role: str = "producer", num_used: int = 60) -> str:
    result = {"rate_rps": 2.5, "peak_kv_bytes": num_used * BLOCK_BYTES, "kv_bytes": NUM_BLOCKS * BLOCK_BYTES,
              "free_bytes": (NUM_BLOCKS - num_used) * BLOCK_BYTES, "role": role}  # fmt: skip
    if kind == "swap":
        result = {"stable_rate_rps": 2.5, "needs_bytes": 2**20}
    path = folder / "profile.json"
    profile = Profile(kind=kind, subject="tiny", machine="a laptop", settings={}, result=result)
    path.write_text(json.dumps(profile.to_json()))
    return str(path)


def make_config(url: str, **flags: Any) -> EngineConfig:
    return EngineConfig(
        model="dummy:tiny-llama", dtype="float32", max_model_len=128, kv_memory=NUM_BLOCKS * BLOCK_BYTES, swap="none",
        coordinator=url, lend="auto", lend_after=1000.0, **flags,
    )  # fmt: skip


def count_kept_blocks(engine: Engine, num_boundaries: int = 60) -> int:
    """Blocks of the pool after ``num_boundaries`` boundaries on a clock of ``Ticks``."""
    assert engine.neighbours is not None
    producer, end_s = Producer(engine), time.monotonic() + HANG_S
    while not engine.neighbours.agent.can_offer:
        assert time.monotonic() < end_s, "it never joined"
        producer.wake()
    engine.clock = Ticks()
    for _ in range(num_boundaries):
        engine.step()
        producer.check()
    return engine.loop.state.ledger.num_blocks


@pytest.mark.parametrize(
    ("flags", "num_kept"),
    [
        (None, NUM_BLOCKS),
        ({}, 80),
        ({"role": "consumer"}, NUM_BLOCKS),
        ({"num_used": 200}, NUM_BLOCKS),
    ],
)
def test_the_profile_is_lent_beside_from_the_start(
    flags: dict[str, Any] | None, num_kept: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A peak of 60 blocks is 80 % of 75 blocks, which quanta of 16 round up to 80."""
    profile = None if flags is None else write_profile(tmp_path, **flags)
    with coordinating() as url, closing(build_engine(make_config(url, profile=profile))) as engine:
        assert engine.config.profile == profile
        assert count_kept_blocks(engine) == num_kept
    told = [line for line in caplog.messages if "was measured for tiny on a laptop, and is used for" in line]
    assert len(told) == (profile is not None)  # it is of another model


def test_what_is_no_llm_profile_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a profile of kind 'swap'; wanted here: llm"):
        build_engine(make_config("http://127.0.0.1:9", profile=write_profile(tmp_path, "swap")))
