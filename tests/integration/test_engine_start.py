"""What an engine logs while it starts."""

from __future__ import annotations

from contextlib import closing

import pytest

from floodplain.cost.model_shape import shape_named
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.stage_build import build_stage
from floodplain.observe.start_log import StartLog


class Recorder(StartLog):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []
        self.notes: list[tuple[int, int]] = []

    def begin(self, step: str) -> None:
        self.steps.append(step)

    def note_bytes(self, num_bytes: int, total_bytes: int) -> None:
        self.notes.append((num_bytes, total_bytes))


@pytest.mark.parametrize(("dtype", "item_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_an_engine_logs_its_steps_and_every_byte_of_weights(dtype: str, item_bytes: int) -> None:
    log = Recorder()
    config = EngineConfig(model="dummy:tiny-llama", dtype=dtype, kv_memory=2**20, swap_memory=2**20)
    with closing(build_engine(config, start_log=log)):
        pass
    total_bytes = shape_named("tiny-llama").param_bytes(item_bytes)
    assert log.notes[-1] == (total_bytes, total_bytes)
    assert [num_bytes for num_bytes, _ in log.notes] == sorted({num_bytes for num_bytes, _ in log.notes})
    first_words = [step.split()[0] for step in log.steps]
    assert first_words == ["opening", "reading", "mapping", "opening", "hashing"]


def test_a_stage_counts_its_own_layers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Recorder()
    monkeypatch.setattr("floodplain.engine.stage_build.StartLog", lambda: log)
    with closing(
        build_stage(EngineConfig(model="dummy:tiny-llama", dtype="float32", kv_memory=2**20, swap="none"), 0, 2)
    ):
        pass
    num_bytes, total_bytes = log.notes[-1]
    assert num_bytes == total_bytes < shape_named("tiny-llama").param_bytes(4)
