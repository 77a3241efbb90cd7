from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.workload.arrivals import Phase, arrival_times, chat_like, phase_arrivals, quiet_burst_quiet
from floodplain.workload.client import token_times
from floodplain.workload.prompts import PromptMaker
from floodplain.workload.records import TokenChunk
from floodplain.workload.traces import TraceRow, load_trace
from tests.support.examples import examples

SEEDS = st.integers(0, 2**32)


@given(SEEDS, st.floats(0.05, 20), st.floats(0.01, 1000))
@settings(max_examples=examples(30))
def test_gamma_gaps_have_the_requested_mean_and_variation(seed: int, burstiness: float, rate: float) -> None:
    count = 20_000
    gaps = np.diff(arrival_times(count, rate, burstiness, np.random.default_rng(seed)), prepend=0.0)
    assert gaps.min() >= 0
    assert gaps.sum() == pytest.approx(count / rate)
    # The sampling error of a coefficient of variation grows with the kurtosis, here 6 / burstiness.
    error = math.sqrt((2 + 6 / burstiness) / count)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=6 * error)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert not arrival_times(7, math.inf, 1.0, np.random.default_rng(0)).any()


@pytest.mark.parametrize(
    ("count", "rate", "burstiness"),
    [(0, 1, 1), (1, 0, 1), (1, -1, 1), (1, math.nan, 1), (1, 1, 0), (1, 1, math.inf), (1, 1, math.nan)],
)
def test_senseless_arrivals_are_refused(count: int, rate: float, burstiness: float) -> None:
    with pytest.raises(UserError):
        arrival_times(count, rate, burstiness, np.random.default_rng(0))


@given(SEEDS, st.lists(st.tuples(st.floats(5, 50), st.floats(0.5, 50)), min_size=1, max_size=5))
@settings(max_examples=examples(30))
def test_each_phase_receives_its_rate(seed: int, shape: list[tuple[float, float]]) -> None:
    phases = [Phase(*each) for each in shape]
    count = round(sum(phase.duration_s * phase.rate for phase in phases))
    times = phase_arrivals(phases, count, 1.0, np.random.default_rng(seed))
    assert len(times) == count
    assert (np.diff(times) >= 0).all()
    start = 0.0
    for phase in phases:
        expected = phase.duration_s * phase.rate
        inside = int(((times >= start) & (times < start + phase.duration_s)).sum())
        assert abs(inside - expected) <= 6 * math.sqrt(expected) + 2
        start += phase.duration_s


def test_only_the_last_phase_may_be_endless() -> None:
    quiet_burst_quiet(1.0, 2.0, 3.0, 4.0)
    with pytest.raises(UserError, match="endless"):
        phase_arrivals([Phase(math.inf, 1.0), Phase(1.0, 1.0)], 3, 1.0, np.random.default_rng(0))
    for duration_s, rate in ((0.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.inf)):
        with pytest.raises(UserError):
            Phase(duration_s, rate)


def test_chat_lengths_have_the_medians_they_promise() -> None:
    drawn = chat_like(20_000, np.random.default_rng(1))
    assert np.median(drawn.prompt_tokens) == pytest.approx(56, rel=0.1)
    assert np.median(drawn.output_tokens) == pytest.approx(210, rel=0.1)
    assert drawn.prompt_tokens.min() >= 1
    assert drawn.output_tokens.max() <= 1024


ROWS = st.lists(
    st.builds(
        TraceRow,
        st.integers(0, 10**9).map(lambda us: us / 1e6),
        st.integers(1, 10**6),
        st.integers(1, 10**5),
        st.lists(st.integers(0, 10**9), max_size=4).map(tuple),
    ),
    min_size=1,
    max_size=20,
)


def save_trace(path: Path, rows: list[TraceRow]) -> None:
    """Write Mooncake's form for ``.jsonl``, else a CSV, which cannot hold prefix ids."""
    if path.suffix == ".jsonl":
        lines = [
            {"timestamp": r.arrival_s * 1e3, "input_length": r.prompt_tokens, "output_length": r.output_tokens}
            | {"hash_ids": r.prefix_ids}
            for r in rows
        ]
        path.write_text("\n".join(map(json.dumps, lines)))
        return
    lines = [f"{r.arrival_s:.6f},{r.prompt_tokens},{r.output_tokens}" for r in rows]
    path.write_text("\n".join(["t_s,prompt_tokens,output_tokens", *lines]))


@given(ROWS, st.sampled_from(["t.csv", "t.jsonl"]))
@settings(max_examples=examples(60))
def test_a_written_trace_reads_back(rows: list[TraceRow], name: str) -> None:
    rows.sort(key=lambda row: row.arrival_s)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        save_trace(path, rows)
        read = load_trace(path).rows
    assert [row.arrival_s for row in read] == pytest.approx([r.arrival_s - rows[0].arrival_s for r in rows], abs=1e-5)
    assert [(r.prompt_tokens, r.output_tokens) for r in read] == [(r.prompt_tokens, r.output_tokens) for r in rows]
    if name.endswith("jsonl"):
        assert [r.prefix_ids for r in read] == [r.prefix_ids for r in rows]


class Words:
    """A tokenizer: one token per word, the word's hash."""

    def encode(self, text: str) -> list[int]:
        return [sum(map(ord, word)) for word in text.split()]


MAKER = PromptMaker(Words(), ["what now", "say it in one word please"])


@given(st.integers(1, 5000), SEEDS, st.lists(st.integers(0, 10**12), max_size=6))
@settings(max_examples=examples(60))
def test_prompts_have_the_requested_length_and_depend_on_the_seed_only(
    num_tokens: int, seed: int, prefix_ids: list[int]
) -> None:
    first, again = (
        MAKER.make_prompt_tokens(num_tokens, np.random.default_rng(seed), prefix_ids=prefix_ids) for _ in range(2)
    )
    assert len(first) == num_tokens
    assert first == again
    block = MAKER.prefix_block(prefix_ids[0], 512) if prefix_ids else ()
    assert first[: len(block)] == block[:num_tokens]


CHUNKS = st.lists(st.text("ab", max_size=5), min_size=1, max_size=12)


@given(CHUNKS, st.integers(1, 40))
def test_a_count_is_shared_over_chunks_with_exact_ends(texts: list[str], num_tokens: int) -> None:
    times = token_times([TokenChunk(float(i), text) for i, text in enumerate(texts)], num_tokens)
    with_text = [i for i, text in enumerate(texts) if text]
    assert times == sorted(times)
    assert len(times) == num_tokens
    if with_text:
        assert times[0] <= with_text[0]
        assert num_tokens == 1 or times[-1] >= with_text[-1]
    if num_tokens >= len(with_text):
        assert set(with_text) <= set(times)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=10))
def test_token_ids_give_the_exact_time_of_each_token(counts: list[int]) -> None:
    chunks = [TokenChunk(float(i), "x", tuple(range(n))) for i, n in enumerate(counts)]
    assert token_times(chunks, None) == [float(i) for i, n in enumerate(counts) for _ in range(n)]
