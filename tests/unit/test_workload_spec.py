from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from dataclasses import fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from floodplain.core.errors import UserError
from floodplain.model.tokenizer import ByteTokenizer
from floodplain.workload.goals import NUM_SAMPLES, SAMPLE_TOKENS, describe_goals, goals_from, measure_goals
from floodplain.workload.records import LoadRequest, RequestFailed, RequestRecord, TokenChunk
from floodplain.workload.spec import WorkloadSpec, build, parse_goodput
from tests.support.records import make_record

BYTES = ByteTokenizer(256)


def test_every_flag_has_a_help_text() -> None:
    assert all(each.metadata["help"] for each in fields(WorkloadSpec))


@pytest.mark.parametrize(
    ("flags", "needle"),
    [
        ({"request_rate": 0.0}, "request_rate"),
        ({"request_rate": -math.inf}, "request_rate"),
        ({"request_rate": math.nan}, "request_rate"),
        ({"request_rate": 1e-300}, "request_rate"),
        ({"num_prompts": 0}, "num_prompts"),
        ({"num_prompts": 10**12}, "num_prompts"),
        ({"burstiness": math.nan}, "burstiness"),
        ({"burstiness": math.inf}, "burstiness"),
        ({"limit": -1}, "limit"),
        ({"trace": Path("t"), "speedup": 0.0}, "speedup"),
        ({"length_scale": -1.0}, "length_scale"),
        ({"max_input": 0}, "max_input"),
        ({"max_output": -3}, "max_output"),
        ({"seed": -1}, "seed"),
        ({"goodput": ("ttft",)}, "goodput"),
        ({"goodput": ("ttft:-1",)}, "goodput"),
        ({"goodput": ("itl:5",)}, "goodput"),
        ({"goodput": ("ttft:1", "ttft:2")}, "twice"),
        ({"trace": Path("t"), "request_rate": 1.0}, "request_rate does not go with a trace"),
        ({"trace": Path("t"), "burstiness": 2.0}, "burstiness does not go with a trace"),
        ({"trace": Path("t"), "num_prompts": 5}, "use limit"),
        ({"trace": Path("t"), "lengths": Path("l")}, "lengths does not go with a trace"),
        ({"speedup": 2.0}, "speedup goes with a trace only"),
        ({"burst_factor": 2.0}, "burst_factor needs a finite request rate"),
    ],
)
def test_bad_flags_are_named(flags: dict[str, Any], needle: str) -> None:
    with pytest.raises(UserError, match=needle):
        WorkloadSpec(**flags)


def test_same_flags_and_seed_give_the_same_requests_another_seed_others() -> None:
    spec = WorkloadSpec(request_rate=3.0, num_prompts=20, max_input=200, max_output=50, ignore_eos=True)
    first, second = build(spec, BYTES), build(spec, BYTES)
    assert first == second
    assert build(WorkloadSpec(request_rate=3.0, num_prompts=20, max_input=200, max_output=50, seed=1), BYTES) != first
    assert all(1 <= len(r.prompt_token_ids) <= 200 and 1 <= r.max_tokens <= 50 and r.ignore_eos for r in first)
    assert len({r.request_id for r in first}) == 20


def test_a_trace_is_replayed_at_its_own_times_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("t_s,prompt_tokens,output_tokens\n5,100,7\n7,3,9\n8,1,1\n")
    requests = build(WorkloadSpec(trace=path, speedup=2.0, limit=2), BYTES)
    assert [(r.arrival_s, len(r.prompt_token_ids), r.max_tokens) for r in requests] == [(0.0, 100, 7), (1.0, 3, 9)]


def test_equal_leading_hash_ids_give_equal_leading_tokens_also_when_scaled(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(
        '{"timestamp":0,"input_length":1500,"output_length":1,"hash_ids":[4,5,6]}\n'
        '{"timestamp":1,"input_length":1400,"output_length":1,"hash_ids":[4,5,9]}\n'
    )
    for scale in (1.0, 0.25):
        a, b = (r.prompt_token_ids for r in build(WorkloadSpec(trace=path, length_scale=scale), BYTES))
        shared = round(1024 * scale)
        assert (len(a), len(b)) == (1500 * scale, 1400 * scale)
        assert a[:shared] == b[:shared]
        assert a[shared : shared + 40] != b[shared : shared + 40]


def test_prompts_of_a_file_are_sent_as_they_are_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt":"Hello","output_tokens":4}\n{"prompt":"A longer one"}\n')
    requests = build(WorkloadSpec(prompts=path, num_prompts=3, max_input=6, max_output=30), BYTES)
    assert [r.prompt for r in requests] == ["Hello", None, "Hello"]
    assert [bytes(r.prompt_token_ids) for r in requests] == [b"Hello", b"A long", b"Hello"]
    assert requests[0].max_tokens == 4
    assert requests[1].max_tokens <= 30


def test_a_burst_brings_its_factor_of_requests() -> None:
    spec = WorkloadSpec(
        request_rate=10.0, num_prompts=4000, burst_factor=4.0, burst_start=100.0, burst_duration=50.0, max_input=5
    )
    times = [r.arrival_s for r in build(spec, BYTES)]
    assert times == sorted(times)
    assert sum(t < 100 for t in times) == pytest.approx(1000, rel=0.1)
    assert sum(100 <= t < 150 for t in times) == pytest.approx(2000, rel=0.1)


def test_absurd_lengths_are_refused_before_they_are_built(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("t_s,prompt_tokens,output_tokens\n0,100,7\n")
    with pytest.raises(UserError, match="max_input"):
        build(WorkloadSpec(trace=path, length_scale=1e8), BYTES)
    with pytest.raises(UserError, match="max_output"):
        build(WorkloadSpec(trace=path, length_scale=1e8, max_input=10), BYTES)


# -- goals measured without load ---------------------------------------------------------------------------------------


LOAD = [
    LoadRequest(
        request_id=f"load-{number}",
        arrival_s=float(number),
        prompt="text",
        prompt_token_ids=tuple(range(number + 1)),
        max_tokens=3 * number + 1,
    )
    for number in range(40)
]


class Target:
    """Answers every request or none; records requests and how many were in flight at once."""

    def __init__(self, *, fails: bool = False) -> None:
        self.sent: list[LoadRequest] = []
        self.most_at_once = self._under_way = 0
        self._fails = fails

    async def send(self, request: LoadRequest) -> AsyncGenerator[TokenChunk, None]:
        self.sent.append(request)
        self._under_way += 1
        self.most_at_once = max(self.most_at_once, self._under_way)
        await asyncio.sleep(0)
        self._under_way -= 1
        if self._fails:
            raise RequestFailed("HTTP 503: no")
        yield TokenChunk(1.0, "a", (1,))
        yield TokenChunk(2.0, "b", (2,))


def record(*gaps_s: float, error: str | None = None) -> RequestRecord:
    """An answer with tokens after these gaps, the first of which is its TTFT."""
    return make_record(*accumulate(gaps_s), error=error)


def test_samples_are_like_the_load_but_share_no_prefix_with_it() -> None:
    target = Target()
    asyncio.run(measure_goals(target, LOAD))
    assert len(target.sent) == NUM_SAMPLES + 1
    lengths = [len(request.prompt_token_ids) for request in target.sent]
    assert (lengths[0], lengths[-1]) == (1, 40)
    assert lengths == sorted(lengths)
    for sample in target.sent[1:]:
        assert sample.prompt is None
        assert sorted(sample.prompt_token_ids) == list(range(len(sample.prompt_token_ids)))
        assert sample.prompt_token_ids[0] != LOAD[0].prompt_token_ids[0]
        assert sample.max_tokens <= SAMPLE_TOKENS
    assert len({request.prompt_token_ids[0] for request in target.sent}) == len(target.sent)


def test_samples_are_sent_one_at_a_time() -> None:
    target = Target()
    asyncio.run(measure_goals(target, LOAD))
    assert target.most_at_once == 1


def test_goals_are_five_times_the_medians_of_complete_answers() -> None:
    records = [record(0.1, 0.02), record(0.2, 0.01, 0.03), record(0.9, 0.5), record(0.001, 9.0, error="cut")]
    assert goals_from(records) == ("ttft:1000", "tpot:100")
    assert parse_goodput(goals_from(records)) == {"ttft": 1000.0, "tpot": 100.0}


def test_what_no_sample_gives_is_no_goal() -> None:
    assert goals_from([record(0.1)]) == ("ttft:500",)
    assert asyncio.run(measure_goals(Target(fails=True), LOAD)) == ()
    assert asyncio.run(measure_goals(Target(), [])) == ()


def test_a_goal_is_never_zero() -> None:
    assert goals_from([record(1e-6, 1e-6)]) == ("ttft:1", "tpot:1")


@pytest.mark.parametrize(
    ("goals", "is_measured", "words"),
    [
        (("ttft:450", "tpot:70"), True, "goals: TTFT 450 ms, TPOT 70 ms (5 times the medians without load)"),
        (("e2el:9",), False, "goals: E2EL 9 ms (as asked)"),
        ((), True, "no goals: no request was answered without load"),
    ],
)
def test_the_line_states_where_goals_come_from(goals: tuple[str, ...], is_measured: bool, words: str) -> None:
    assert describe_goals(goals, is_measured=is_measured) == words
