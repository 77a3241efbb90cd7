"""Stages of a pipeline inside one process: their tokens are those of one engine, and a layer left out is noticed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from floodplain.cluster.instance.stage_member import open_stage
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.plan import PrefillChunk, PromptLogprobs, StepPlan, StepResult, TableUpdate
from floodplain.core.request import Request, SeqId
from floodplain.core.sampling import ANY_OBJECT, SamplingParams
from floodplain.cost.pipeline import ChunkPrice, cost_by_shape
from floodplain.engine.batches import Batches
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.runner import StageRunner
from floodplain.engine.shell import Engine
from floodplain.engine.stage_build import Stage, build_stage
from floodplain.files.profile import Profile
from floodplain.model.weights.open_model import open_model
from floodplain.observe.strict_json import save_result
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.microbatch import MicrobatchRule
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopConfig, LoopState
from tests.support.loops import make_request

MODEL = "dummy:tiny-deep"
CONFIG = EngineConfig(model=MODEL, dtype="float32", kv_memory=2**22, max_model_len=512, swap="none", policy="fcfs")
SHAPE = open_model(MODEL).config.shape
GREEDY: dict[str, Any] = {"ignore_eos": True}


@contextmanager
def stages_of(num_stages: int, config: EngineConfig = CONFIG) -> Iterator[list[Stage]]:
    with ExitStack() as stack:
        stages = []
        for index in range(num_stages):
            stages.append(build_stage(config, index, num_stages))
            stack.callback(stages[-1].close)
        yield stages


def requests(number: int, **params: Any) -> list[Request]:
    how = GREEDY | params
    prompts = [tuple((7 * n + 3 * i) % 256 for i in range(5 + 29 * n % 200)) for n in range(number)]
    return [make_request(str(n), prompt, float(n), max_tokens=8 + n % 9, **how) for n, prompt in enumerate(prompts)]


class Chain:
    """Stages one after the other; steps are collected as late as the loop allows."""

    def __init__(self, runners: Sequence[StageRunner]) -> None:
        self._runners = runners
        self._under_way: deque[tuple[StepPlan, StepResult]] = deque()

    def submit(self, plan: StepPlan) -> None:
        x: torch.Tensor | StepResult | None = None
        for runner in self._runners:
            assert not isinstance(x, StepResult)
            x = runner.run(plan, x)
        assert isinstance(x, StepResult)
        self._under_way.append((plan, x))

    def collect(self) -> StepResult:
        plan, result = self._under_way.popleft()
        if len(self._runners) > 1:
            self._runners[0].take_tokens(plan, result.token_ids)
        return result


def serve(stages: Sequence[Stage], asked: Sequence[Request], num_blocks: int, split: Any = "even") -> list[list[int]]:
    rule = MicrobatchRule(split, ChunkPrice(cost_by_shape(SHAPE)), least_tokens=32)
    policy = FcfsPolicy(microbatches=rule)
    config = LoopConfig(max_model_len=512, max_batched_tokens=128, max_num_seqs=8, depth=len(stages))
    loop = Loop(LoopState(config, stages[0].make_ledger(num_blocks), policy), policy)
    chain = Chain([stage.make_runner(512) for stage in stages])
    outputs: dict[int, list[int]] = {int(loop.submit(request)): [] for request in asked}
    now = num_out = 0
    while loop.has_unfinished:
        now += 1
        plan = loop.next_plan(float(now))
        if isinstance(plan, StepPlan):
            chain.submit(plan)
            num_out += 1
            continue
        out = loop.complete(chain.collect(), float(now))
        for seq_id, token in zip(out.seq_ids, out.token_ids, strict=True):
            outputs[seq_id].append(token)
    assert loop.counters.num_recomputed_tokens or num_blocks > 100
    return list(outputs.values())


def drain(engine: Engine, asked: Sequence[Request]) -> list[list[int]]:
    outputs = {engine.add(request): list[int]() for request in asked}
    while engine.has_unfinished:
        for seq_id, delta in engine.step():
            outputs[seq_id] += delta.token_ids
    return list(outputs.values())


def one_engine(asked: Sequence[Request]) -> list[list[int]]:
    engine = build_engine(CONFIG)
    outputs = drain(engine, asked)
    engine.close()
    return outputs


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_tokens_are_those_of_one_engine_also_through_preemptions(num_stages: int) -> None:
    asked = requests(12)
    expected = one_engine(asked)
    with stages_of(num_stages) as stages:
        assert [layer for stage in stages for layer in stage.parts.layers] == list(range(SHAPE.num_layers))
        for num_blocks, split in ((32, "even"), (128, "tokens"), (128, "halving")):
            assert serve(stages, asked, num_blocks, split) == expected


def test_seeded_samples_and_shortest_outputs_are_those_of_one_engine() -> None:
    asked = [
        replace(one, params=replace(one.params, temperature=1.0, seed=5, min_tokens=4, ignore_eos=False))
        for one in requests(8)
    ]
    with stages_of(2) as stages:
        assert serve(stages, asked, 128) == one_engine(asked)


def test_penalties_and_bad_words_count_the_same_tokens_in_stages_and_after_preemptions() -> None:
    plain = requests(12)
    bad = tuple((token,) for token in one_engine(plain)[0][:4])
    fields: dict[str, Any] = {"repetition_penalty": 3.0, "frequency_penalty": 1.0, "bad_token_ids": bad}
    asked = [replace(one, params=replace(one.params, **fields)) for one in plain]
    asked[0] = replace(plain[0], params=replace(plain[0].params, ignore_eos=False, structure=ANY_OBJECT))
    expected = one_engine(asked)
    assert bytes(expected[0][:1]) == b"{"
    assert sum(one != other for one, other in zip(expected, one_engine(plain), strict=True)) > 6
    assert not {token for (token,) in bad} & {token for tokens in expected for token in tokens}
    with stages_of(2) as stages:
        first, *others = serve(stages, asked, 32)
    assert first[: len(expected[0])] == expected[0] and others == expected[1:]  # the loop knows no end of sequence


@pytest.mark.parametrize("max_tokens_of_step", [7, 64])
def test_a_prompt_is_scored_by_the_last_stage(max_tokens_of_step: int) -> None:
    prompt = tuple(range(3, 33))
    with stages_of(1) as alone, stages_of(3) as stages:
        found = [
            scores_of(run, prompt, max_tokens_of_step if run is stages else len(prompt)) for run in (alone, stages)
        ]
    assert len(found[0]) == len(found[1]) == len(prompt) - 1
    assert all(abs(a.chosen - b.chosen) < 1e-4 and a.rank == b.rank for a, b in zip(*found, strict=True))


def test_an_ended_request_leaves_nothing_behind() -> None:
    fields: dict[str, Any] = {"frequency_penalty": 1.0, "prompt_logprobs": 1}
    chunk = PrefillChunk(SeqId(0), 0, (1, 2), True, make_request("r", (1, 2), max_tokens=9, **fields))
    batches = Batches(torch.device("cpu"), block_tokens=16, max_model_len=64)
    batches.apply(StepPlan(step_id=0, decodes=(), prefills=(chunk,)))
    assert batches._histories and batches.scores._prompts
    batches.apply(StepPlan(step_id=1, decodes=(), prefills=(), released=(SeqId(0),)))
    assert not (batches._histories or batches._params or batches.scores._prompts)


def test_a_prompt_whose_beginning_came_from_elsewhere_has_no_scores() -> None:
    with stages_of(1) as stages:
        assert scores_of(stages, tuple(range(3, 33)), 64, begin=16) == ()


def scores_of(stages: Sequence[Stage], prompt: tuple[int, ...], size: int, begin: int = 0) -> PromptLogprobs:
    """Return the scores of a prompt that is computed in chunks of ``size``, from ``begin`` on."""
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    request = Request(request_id="r", prompt_token_ids=prompt, params=params, arrival_s=0.0)
    runners = [stage.make_runner(256) for stage in stages]
    result: Any = None
    for step, start in enumerate(range(begin, len(prompt), size)):
        part = prompt[start : start + size]
        is_last = start + size >= len(prompt)
        chunk = PrefillChunk(SeqId(0), start, part, is_last, request if start == begin else None)
        blocks = tuple(map(BlockId, range(4)))
        tables = (TableUpdate(SeqId(0), 0, blocks),) if start == begin else ()
        result = None
        for runner in runners:
            result = runner.run(StepPlan(step_id=step, decodes=(), prefills=(chunk,), tables=tables), result)
    found: PromptLogprobs = result.prompt_logprobs[SeqId(0)]
    return found


def test_a_stage_that_skips_a_layer_is_noticed() -> None:
    asked = requests(4)
    with stages_of(2) as stages:
        model = stages[1].parts.model
        model.held = range(model.held.start, model.held.stop)[1:]
        assert serve(stages, asked, 128) != one_engine(asked)


def test_layers_of_other_stages_are_not_loaded_and_their_memory_is_kv() -> None:
    plain = replace(CONFIG, pack_weights=False)
    with stages_of(2, plain) as stages:
        stage = stages[1]
        block_bytes = SHAPE.kv_bytes_per_token(4) * CONFIG.block_tokens
        spare_bytes = (SHAPE.num_layers - len(stage.parts.layers)) * SHAPE.layer_bytes(4)
        own_bytes = block_bytes * len(stage.parts.layers) // SHAPE.num_layers
        assert stage.num_blocks >= (2**22 + spare_bytes) // own_bytes
        assert len(stage.memory.layer_buffers) == len(stage.parts.layers)
        with pytest.raises(InvariantError, match="layer 0 is to run, and only layers"):
            stage.parts.model._expect_parameters(0)


async def test_one_stage_warns_of_a_step_profile_of_another_machine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = {"base_s": 0.01, "decode_s": 0.001, "prefill_token_s": 0.001}
    profile = Profile(kind="step", subject=MODEL, machine="a laptop", settings={}, result=result)
    save_result(tmp_path / "steps.json", profile.to_json())
    for place in range(2):
        await open_stage(CONFIG, place, 2, "even", tmp_path / "steps.json").close()
    told = [line for line in caplog.messages if "steps.json was measured for" in line]
    assert len(told) == 1 and " on a laptop, and is used for " in told[0]
