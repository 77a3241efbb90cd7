from __future__ import annotations

from pathlib import Path

import pytest

from floodplain.bench.run import read_trace
from floodplain.workload.spec import WorkloadSpec

HEADER = "t_s,prompt_tokens,output_tokens\n"


def test_skipped_rows_are_one_line_with_count_reason_and_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEADER + "0,5,3\n1,0,3\n2,5,0\n3,5,3\n4,5,3\n")
    trace = read_trace(WorkloadSpec(trace=path, limit=1))
    assert trace is not None
    assert (len(trace.rows), trace.num_skipped) == (3, 2)
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    for needle in (f"2 of 5 rows of {path}", "no prompt or no output token", "at least 1 token"):
        assert needle in told.err


def test_a_whole_trace_and_no_trace_are_worth_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEADER + "0,5,3\n")
    trace = read_trace(WorkloadSpec(trace=path))
    assert trace is not None and trace.num_skipped == 0
    assert read_trace(WorkloadSpec()) is None
    assert capsys.readouterr().err == ""
