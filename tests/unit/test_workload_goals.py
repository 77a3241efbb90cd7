"""Goals measured without load: the samples that are sent, and goals from the answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from floodplain.workload.goals import NUM_SAMPLES, SAMPLE_TOKENS, describe_goals, goals_from, measure_goals
from floodplain.workload.records import LoadRequest, RequestFailed, RequestRecord, TokenChunk
from floodplain.workload.spec import parse_goodput

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


def record(ttft_s: float, *gaps_s: float, error: str | None = None) -> RequestRecord:
    times_s = [ttft_s]
    for gap_s in gaps_s:
        times_s.append(times_s[-1] + gap_s)
    return RequestRecord(
        request_id="r", prompt_tokens=1, arrival_s=0.0, sent_s=0.0, finished_s=times_s[-1],
        token_times_s=tuple(times_s), output_token_ids=None, text="", error=error,
    )  # fmt: skip


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
