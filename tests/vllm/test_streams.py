"""Streamed inputs: requests whose prompts go on after their answers get the tokens of stock vLLM."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.v1.core.sched.interface import PauseState

from floodplain.plugins.vllm.compat_streamed_inputs import StreamedInputScheduler
from floodplain.policy.registry import make_policy
from tests.vllm.ahead import plan_ahead
from tests.vllm.engines import close, make_crowded, make_stock, scheduler_of
from tests.vllm.storm import StormPolicy

FLAGS = {"skip_tokenizer_init": True}
NUM_SESSIONS = 12
STOPS = list(range(0, 40_000, 15))
"""Tokens that end an answer: with async scheduling, its next step is then outstanding."""


class Session:
    """Three parts of a prompt, each with an answer.

    Of each three sessions, the first sends all parts at once, the second one after each answer, and the last goes on
    only when the others have ended: until then it holds blocks and does not run.
    """

    def __init__(self, number: int) -> None:
        dice = Random(number)
        self.name = f"session-{number}"
        self.is_eager, self.is_patient = number % 3 == 0, number % 3 == 2
        lengths = [(dice.randrange(20, 70), dice.randrange(10, 40)) for _ in range(3)]
        self.parts = deque(([dice.randrange(10, 40_000) for _ in range(most)], answer) for most, answer in lengths)
        self.tokens: list[int] = []

    def send(self, llm: LLM) -> None:
        """Send the next part, or the end."""
        is_end = not self.parts
        prompt, num_answer = ([0], 1) if is_end else self.parts.popleft()
        params = SamplingParams(
            temperature=0.0, max_tokens=num_answer, ignore_eos=True, stop_token_ids=[] if self.is_patient else STOPS
        )
        core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        made = llm.llm_engine.input_processor.process_inputs(
            self.name, {"prompt_token_ids": prompt}, params, ("generate",), resumable=not is_end
        )
        request, _ = core.preprocess_add_request(made)
        core.scheduler.add_request(request)


def serve(llm: LLM, each_step: Callable[[], None] = lambda: None) -> dict[str, list[int]]:
    """Serve all sessions to their ends; return the tokens of all their answers."""
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    sessions = {one.name: one for one in map(Session, range(NUM_SESSIONS))}
    waits: list[Session] = []
    for one in sessions.values():
        for _ in range(4 if one.is_eager else 1):
            one.send(llm)
    for _ in range(5_000):
        each_step()
        outputs: Any = core.step_fn()[0] or {}
        for output in [output for each in outputs.values() for output in each.outputs]:
            one = sessions[output.request_id]
            one.tokens += output.new_token_ids
            if output.finish_reason is not None and not one.is_eager:
                waits.append(one)
        is_late = len(core.scheduler.requests) == sum(one.is_patient for one in waits)
        for one in [one for one in waits if is_late or not one.is_patient]:
            waits.remove(one)
            one.send(llm)
        if not core.scheduler.requests:
            return {one.name: one.tokens for one in sessions.values()}
    raise AssertionError("it does not end")


@pytest.fixture(scope="module")
def expected(llama: Path) -> dict[str, list[int]]:
    stock = make_stock(llama, **FLAGS)
    tokens = serve(stock)
    close(stock)
    assert all(len(one) > 10 for one in tokens.values())
    return tokens


SMALL = {"num_gpu_blocks_override": 22}
"""A pool in which sessions that keep their blocks between two inputs would wait for each other."""
FEW = {"num_gpu_blocks_override": 60, "max_num_seqs": 3}
"""As few places on the device."""


@pytest.fixture(scope="module", params=[SMALL, SMALL | {"async_scheduling": True}, FEW], ids=["", "async", "few"])
def engine(request: pytest.FixtureRequest, llama: Path, expected: dict[str, list[int]]) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param.get("async_scheduling"):
            plan_ahead(patch)
        llm = make_crowded(llama, **FLAGS, **request.param)
        yield llm
        close(llm)


@pytest.fixture
def counts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count requests that are parked, and those preempted while the end of an answer was on its way."""
    found, park, stop = Counter[str](), StreamedInputScheduler.park, StreamedInputScheduler._handle_stopped_request

    def note_park(scheduler: StreamedInputScheduler, request: Any) -> None:
        found["parked"] += 1
        park(scheduler, request)

    def note_stop(scheduler: StreamedInputScheduler, request: Any) -> bool:
        found["left"] += request.resumable and not request.num_computed_tokens
        return stop(scheduler, request)

    monkeypatch.setattr(StreamedInputScheduler, "park", note_park)
    monkeypatch.setattr(StreamedInputScheduler, "_handle_stopped_request", note_stop)
    return found


@pytest.mark.parametrize("policy", ["timely", "fcfs"])
def test_sessions_that_wait_for_input_stop_no_other(
    llm: LLM, expected: dict[str, list[int]], counts: Counter[str], policy: str
) -> None:
    scheduler = scheduler_of(llm)
    scheduler.policy_object = make_policy(policy)

    def count_in_a_pause() -> None:
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        assert scheduler.get_num_unfinished_requests() == len(scheduler.running) + len(scheduler.holding)
        scheduler.set_pause_state(PauseState.UNPAUSED)

    assert serve(llm, count_in_a_pause) == expected
    assert counts["parked"] > 2


def test_tokens_of_sessions_survive_a_storm(llm: LLM, expected: dict[str, list[int]], counts: Counter[str]) -> None:
    scheduler = scheduler_of(llm)
    for seed in range(3):
        policy = scheduler.policy_object = StormPolicy(seed, chance=0.1)
        assert serve(llm) == expected
        assert policy.num_sent_away > 20
    assert counts["parked"] > 2
    assert (counts["left"] > 0) is scheduler.is_async


def test_workers_must_see_the_next_input(
    llm: LLM, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a request that was preempted goes on as if it had no new input."""
    monkeypatch.setattr(scheduler_of(llm), "_renewed", _Nothing())
    assert serve(llm) != expected


class _Nothing(set[str]):
    def add(self, element: str) -> None: ...
