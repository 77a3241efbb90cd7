"""The engine's shell with several outstanding steps: results are collected in order of submission."""

from __future__ import annotations

from collections import deque

import pytest

from floodplain.core.plan import StepPlan, StepResult
from floodplain.core.request import Request, SeqId
from floodplain.engine.config import EngineConfig
from floodplain.engine.shell import Engine
from floodplain.model.tokenizer import ByteTokenizer
from tests.support.loops import FakeExecutor, make_loop, make_request, reference_output

MAX_MODEL_LEN = 64


class LateExecutor(FakeExecutor):
    """Runs a plan only when its result is collected."""

    def __init__(self) -> None:
        super().__init__(block_tokens=4)
        self.most_outstanding = 0
        self._submitted: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        mine = set(plan.decodes)
        assert not any(mine & set(members(other)) for other in self._submitted), "a stream is in two steps"
        self._submitted.append(plan)
        self.most_outstanding = max(self.most_outstanding, len(self._submitted))

    def collect(self) -> StepResult:
        return self.execute(self._submitted.popleft())


def members(plan: StepPlan) -> tuple[SeqId, ...]:
    return plan.decodes + tuple(chunk.seq_id for chunk in plan.prefills)


def serve(depth: int, requests: list[Request], num_blocks: int) -> tuple[dict[SeqId, list[int]], LateExecutor]:
    """Serve all requests. Returns the tokens of each, and the executor."""
    executor = LateExecutor()
    loop = make_loop(num_blocks=num_blocks, depth=depth, max_model_len=MAX_MODEL_LEN)
    engine = Engine(
        loop,
        executor,
        ByteTokenizer(256),
        model_name="fake",
        config=EngineConfig(model="fake"),
        block_bytes=1,
        vocab_size=256,
    )
    outputs: dict[SeqId, list[int]] = {engine.add(request): [] for request in requests}
    while engine.has_unfinished:
        for seq_id, delta in engine.step():
            outputs[seq_id] += delta.token_ids
        loop.check_integrity()
    assert len(engine.take_finished()) == len(requests)
    return outputs, executor


@pytest.mark.parametrize("num_blocks", [80, 17])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_tokens_are_the_same_however_many_steps_are_outstanding(depth: int, num_blocks: int) -> None:
    requests = [make_request(f"r{n}", tuple(range(n, n + 5)), float(n), max_tokens=20) for n in range(9)]
    outputs, executor = serve(depth, requests, num_blocks)
    assert executor.most_outstanding == depth
    assert list(outputs.values()) == [reference_output(request, MAX_MODEL_LEN) for request in requests]


def test_a_request_alone_is_in_one_step_at_a_time() -> None:
    _, executor = serve(4, [make_request("r", tuple(range(5)), max_tokens=20)], num_blocks=16)
    assert executor.most_outstanding == 1
