from __future__ import annotations

from pathlib import Path

import pytest

from floodplain.model.tokenizer import ByteTokenizer
from floodplain.workload.arrivals import load_lengths
from floodplain.workload.prompts import load_prompts
from floodplain.workload.spec import WorkloadSpec, build
from floodplain.workload.traces import load_trace


@pytest.mark.parametrize(
    ("name", "num_rows", "mean_prompt", "mean_output"),
    [
        ("azure2023_conv.csv", 12_340, 1246, 204),
        ("azure2023_code.csv", 6_521, 2040, 27),
        ("burstgpt_7d_3class.csv", 8_499, 685, 294),
        ("burstgpt_gpt4api_834s.csv", 412, 1203, 161),
        ("mooncake_conversation.jsonl", 6_848, 12_600, 347),
    ],
)
def test_traces_have_the_size_and_means_that_their_description_gives(
    shared_dir: Path, name: str, num_rows: int, mean_prompt: float, mean_output: float
) -> None:
    trace = load_trace(shared_dir / "data" / "traces" / name)
    assert len(trace.rows) + trace.num_skipped == num_rows
    assert sum(row.prompt_tokens for row in trace.rows) / len(trace.rows) == pytest.approx(mean_prompt, rel=0.005)
    assert sum(row.output_tokens for row in trace.rows) / len(trace.rows) == pytest.approx(mean_output, abs=0.5)
    assert trace.rows[0].arrival_s == 0.0


def test_every_trace_length_and_prompt_file_loads(shared_dir: Path) -> None:
    folder = shared_dir / "data" / "traces"
    traces = [path for path in sorted(folder.iterdir()) if path.name.startswith(("azure", "burst", "mooncake"))]
    lengths = sorted(folder.glob("len_*.csv"))
    assert len(traces) >= 7
    assert len(lengths) >= 7
    assert all(load_trace(path).rows for path in traces)
    assert all(len(load_lengths(path).prompt_tokens) for path in lengths)
    assert len(load_prompts(folder / "prompts.jsonl")) == 479


def test_mooncake_prefixes_are_shared_as_recorded(shared_dir: Path) -> None:
    path = shared_dir / "data" / "traces" / "mooncake_conversation.jsonl"
    rows = load_trace(path).rows[:40]
    requests = build(WorkloadSpec(trace=path, limit=40), ByteTokenizer(256))
    for row, built in zip(rows, requests, strict=True):
        assert len(built.prompt_token_ids) == row.prompt_tokens
    first, second = (built.prompt_token_ids for built in requests[:2])
    assert rows[0].prefix_ids[0] == rows[1].prefix_ids[0]
    assert rows[0].prefix_ids[1] != rows[1].prefix_ids[1]
    assert first[:512] == second[:512]
    assert first[512:1024] != second[512:1024]
