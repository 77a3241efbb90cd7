from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from floodplain.bench.run import read_trace
from floodplain.core.errors import UserError
from floodplain.model.tokenizer import ByteTokenizer
from floodplain.workload.arrivals import load_lengths
from floodplain.workload.prompts import load_prompts, package_prompts
from floodplain.workload.spec import WorkloadSpec, build
from floodplain.workload.traces import TraceRow, load_trace

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:05.2299600,396,109\n"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n118,GPT-4,417,276,693,API log\n"
)
OURS = "t_s,timestamp,cls,prompt_tokens,output_tokens\n41,7303241,api,249,619\n66,7303266,conv,110,5\n"
MOONCAKE = (
    '{"timestamp": 3000, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}\n'
    '{"timestamp": 0, "input_length": 600, "output_length": 26, "hash_ids": [46, 57]}\n'
)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("azure.csv", AZURE, (TraceRow(0.0, 374, 44), TraceRow(1.25, 396, 109))),
        ("burst.csv", BURSTGPT, (TraceRow(0.0, 472, 18), TraceRow(113.0, 417, 276))),
        ("ours.csv", OURS, (TraceRow(0.0, 249, 619), TraceRow(25.0, 110, 5))),
        (
            "texts.csv",
            't_s,text,prompt_tokens,output_tokens\n0,a\u2028b\x0c,1,2\n1,"c\nd",3,4\n',
            (TraceRow(0.0, 1, 2), TraceRow(1.0, 3, 4)),
        ),
        ("excel.csv", AZURE + " , ,\r\n,,\r\n  \n", (TraceRow(0.0, 374, 44), TraceRow(1.25, 396, 109))),
        ("mooncake.NDJSON", MOONCAKE, (TraceRow(0.0, 600, 26, (46, 57)), TraceRow(3.0, 1100, 52, (46, 47, 48)))),
        ("mooncake.jsonl", MOONCAKE, (TraceRow(0.0, 600, 26, (46, 57)), TraceRow(3.0, 1100, 52, (46, 47, 48)))),
    ],
)
def test_every_format_is_recognised_by_its_columns(
    tmp_path: Path, name: str, text: str, expected: tuple[TraceRow, ...]
) -> None:
    assert load_trace(write(tmp_path, name, text)).rows == expected


AIPERF = (
    '{"session_id": "a", "timestamp": 1000, "input_length": 600, "output_length": 26, "hash_ids": null, "delay": 0}\n'
    '{"session_id": "a", "timestamp": 1500.5, "delay": 9, "input_length": 9, "output_length": 2, "model": "m"}\n'
)


@pytest.mark.parametrize("name", ["aiperf.jsonl", "aiperf.json"])
def test_a_turn_of_a_session_arrives_at_its_timestamp(tmp_path: Path, name: str) -> None:
    text = AIPERF if name.endswith("jsonl") else f"[{','.join(AIPERF.splitlines())}]"
    assert load_trace(write(tmp_path, name, text)).rows == (TraceRow(0.0, 600, 26), TraceRow(0.5005, 9, 2))


@pytest.mark.parametrize(
    ("more", "needles"),
    [
        ({"timestamp": None, "delay": 5}, ("delay", "timestamp")),
        ({"wait_for": ["r1"]}, ("wait_for",)),
        ({"branches": ["r1"]}, ("branches",)),
        ({"tool_wait_ms": 4.0}, ("tool_wait_ms",)),
        ({"tool_events": [{}]}, ("tool_events",)),
        ({"text_input": "hi"}, ("text_input", "--prompts")),
        ({"messages": [{}]}, ("messages", "--prompts")),
        ({"conversations": []}, ("conversations", "--prompts")),
        ({"chat_id": 5}, ("chat_id", "Bailian")),
        ({"block_size": 16}, ("block_size", "512")),
        ({"output_length": None}, ("needs", "output_length")),
    ],
)
def test_what_a_replay_cannot_do_is_refused_by_name(
    tmp_path: Path, more: dict[str, object], needles: tuple[str, ...]
) -> None:
    plain = {"timestamp": 1, "input_length": 3, "output_length": 2, "wait_for": [], "session_id": "s"}
    path = write(tmp_path, "t.jsonl", json.dumps(plain) + "\n" + json.dumps({**plain, **more}))
    with pytest.raises(UserError) as caught:
        load_trace(path)
    assert all(needle in str(caught.value) for needle in ("line 2", *needles))


def test_the_first_question_of_a_sharegpt_conversation_is_a_prompt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def said(*turns: tuple[str, str]) -> dict[str, object]:
        return {"id": "x", "conversations": [{"from": who, "value": what} for who, what in turns]}

    talks = [
        said(("human", "What is a flood?"), ("gpt", "Water."), ("human", "Why?"), ("gpt", "Rain.")),
        said(("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello there")),
        said(("gpt", "Hello"), ("human", "Hi")),
        said(("human", "Alone")),
        said(("human", " "), ("gpt", "What?")),
        {"id": "y", "conversations": []},
    ]
    path = write(tmp_path, "sharegpt.json", json.dumps(talks))
    prompts = load_prompts(path)
    assert [(p.text, p.answer) for p in prompts] == [("What is a flood?", "Water."), ("Hi", "Hello there")]
    assert [record.args for record in caplog.records] == [(path, 4)]
    requests = build(WorkloadSpec(prompts=path), ByteTokenizer(256))
    assert [(r.prompt, r.max_tokens) for r in requests] == [("What is a flood?", 6), ("Hi", 11)]
    with pytest.raises(UserError, match="item 1: conversations must be a list of turns"):
        load_prompts(write(tmp_path, "bad.json", '[{"conversations": "hi"}]'))


def test_recorded_failures_are_counted_not_replayed(tmp_path: Path) -> None:
    assert load_trace(write(tmp_path, "burst.csv", BURSTGPT)).num_skipped == 1


@pytest.mark.parametrize(
    ("first", "second", "gap_s"),
    [
        ("2024-05-10 00:00:00+00:00", "2024-05-10 02:00:01+02:00", 1.0),
        ("2024-05-10T00:00:00Z", "2024-05-09T19:30:00.25-04:30", 0.25),
        ("2024-05-10 00:00:00", "2024-05-10 05:30:02+05:30", 2.0),
        ("2024-05-10 00:00:00 UTC", "2024-05-10 02:00:03.5000001+02:00", 3.5),
        ("2024-12-31 23:59:59", "2025-01-01", 1.0),
        ("1715299200", "1715299203.5", 3.5),
    ],
)
def test_dates_with_an_offset_and_dates_in_utc_are_one_time_line(
    tmp_path: Path, first: str, second: str, gap_s: float
) -> None:
    lines = [f"{second},2,6", f"{first},1,5"]
    csv = write(tmp_path, "t.csv", "\n".join(["timestamp,prompt_tokens,output_tokens", *lines, ""]))
    assert load_trace(csv).rows == (TraceRow(0.0, 1, 5), TraceRow(gap_s, 2, 6))
    jsonl = "".join(f'{{"timestamp": "{when}", "input_length": 1, "output_length": 1}}\n' for when in (first, second))
    unit_s = 1e-3 if first.isdigit() else 1.0  # numbers of a JSONL trace are milliseconds
    assert load_trace(write(tmp_path, "t.jsonl", jsonl)).rows[1].arrival_s == pytest.approx(gap_s * unit_s)


def test_options_scale_before_they_cut(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path, "a.csv", AZURE)).scaled(
        speedup=5.0, length_scale=0.5, max_input=190, max_output=30, limit=2
    )
    assert trace.rows == (TraceRow(0.0, 187, 22), TraceRow(0.25, 190, 30))
    assert len(trace.scaled(limit=1).rows) == 1
    assert trace.scaled(length_scale=1e-6).rows[0].prompt_tokens == 1


@pytest.mark.parametrize(
    ("name", "text", "needles"),
    [
        ("x.csv", "when,prompt_tokens,output_tokens\n1,2,3\n", ("when, prompt_tokens", "t_s, timestamp")),
        ("x.csv", "t_s,words,output_tokens\n1,2,3\n", ("words", "prompt_tokens", "contexttokens")),
        ("x.csv", "t_s,prompt_tokens,output_tokens\n1,2\n", ("line 2", "2 values under 3")),
        ("x.csv", "t_s,prompt_tokens,output_tokens\n1,-2,3\n", ("line 2", "prompt_tokens", "'-2'")),
        ("x.csv", "t_s,prompt_tokens,output_tokens\n1,inf,3\n", ("prompt_tokens", "'inf'")),
        ("x.csv", "t_s,prompt_tokens,output_tokens\nnan,2,3\n", ("line 2", "a number of seconds or", "'nan'")),
        ("x.csv", "t_s,prompt_tokens,output_tokens\nyesterday,2,3\n", ("yesterday",)),
        ("x.csv", "t_s,prompt_tokens,output_tokens\n1,2,0\n", ("no request",)),
        ("x.csv", "timestamp,prompt_tokens,output_tokens\n1,2,3\n2024-05-10,2,3\n", ("numbers", "dates", "one way")),
        ("x.csv", "", ("empty",)),
        ("x.csv", "t_s;prompt_tokens;output_tokens\n0;1;1\n", ("separates columns by ';'", "commas")),
        ("x.csv", "t_s\tprompt_tokens\toutput_tokens\n0\t1\t1\n", ("separates columns by '\\t'", "commas")),
        ("x.csv", "t_s,prompt_tokens,output_tokens\n0,1,1\n1e300,1,1\n", ("spans more than 1e+09 seconds",)),
        ("x.csv", "t_s,prompt_tokens,output_tokens\n-1e308,1,1\n1e308,1,1\n", ("spans more than",)),
        (
            "x.csv",
            "timestamp,prompt_tokens,output_tokens\n1715299200123,1,1\n1715299200999,1,1\n",
            ("another unit", "read as seconds"),
        ),
        ("x.csv", "t_s,prompt_tokens,Prompt_Tokens,output_tokens\n0,1,2,1\n", ("two columns prompt_tokens",)),
        ("x.csv", "timestamp,prompt_tokens,output_tokens\n1970-01-01,1,1\n9999-12-31,1,1\n", ("spans more than",)),
        ("x.jsonl", "[" * 100_000, ("x.jsonl", "nested too deeply")),
        ("x.jsonl", f'{{"timestamp": {"9" * 5000}}}', ("line 1", "too many digits")),
        ("x.jsonl", '{"timestamp": 1e999}', ("line 1", "not finite")),
        ("x.csv", 't_s,prompt_tokens,output_tokens\n1,"2"2,3\n', ("line 2", "not CSV")),
        ("x.csv", 't_s,prompt_tokens,output_tokens\n1,"2,3\n', ("line 2", "not CSV")),
        ("x.csv", f"t_s,prompt_tokens,output_tokens\n1,{'9' * 200_000},3\n", ("line 2", "not CSV")),
        ("x.csv", "t_s,prompt_tokens,output_tokens\n1,1e30,3\n", ("prompt_tokens", "at most", "'1e30'")),
        (
            "x.jsonl",
            f'{{"timestamp": 1, "input_length": 1{"0" * 400}, "output_length": 3}}\n',
            ("input_length", "at most"),
        ),
        ("x.jsonl", '{"timestamp": 1, "input_length": 3}\n', ("line 1", "output_length")),
        (
            "x.jsonl",
            '{"timestamp": "soon", "input_length": 1, "output_length": 3}\n',
            ("line 1", "a number of milliseconds or an ISO date", "'soon'"),
        ),
        ("x.jsonl", '{"timestamp": 1\n', ("line 1", "not JSON")),
        ("x.jsonl", "[1]\n", ("item 1", "not a JSON object")),
        ("x.jsonl", '{"timestamp":1,"input_length":3,"output_length":1,"hash_ids":[-1]}', ("hash_ids",)),
        ("x.jsonl", '{"timestamp":1,"input_length":true,"output_length":1}', ("input_length", "True")),
    ],
)
def test_a_bad_trace_gets_one_line_that_names_the_problem(
    tmp_path: Path, name: str, text: str, needles: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as caught:
        load_trace(write(tmp_path, name, text))
    message = str(caught.value)
    assert "\n" not in message
    assert all(needle in message for needle in needles), message


def test_dates_have_no_unit_to_doubt(tmp_path: Path) -> None:
    text = "timestamp,prompt_tokens,output_tokens\n1970-01-01,1,1\n9999-12-31,1,1\n"
    with pytest.raises(UserError, match=r"spans more than 1e[+]09 seconds$"):
        load_trace(write(tmp_path, "x.csv", text))


@pytest.mark.parametrize(
    ("suffix", "times", "doubt"),
    [
        ("jsonl", [0.25 * place for place in range(20)], "has 4000 requests/s"),
        ("jsonl", [1715299200 + 250 * place for place in range(3)], "begins 20 days after 1970"),
        ("jsonl", [250 * place for place in range(20)], None),
        ("jsonl", [1715299200123 + 250 * place for place in range(20)], None),
        ("jsonl", [0] * 20, None),
        ("csv", [250 * place for place in range(20)], "has one request in 250 s"),
        ("csv", [0.25 * place for place in range(20)], None),
        ("csv", [1715299200 + place for place in range(20)], None),
    ],
)
def test_a_trace_in_the_unit_of_the_other_format_is_one_warning(
    suffix: str, times: list[float], doubt: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if suffix == "csv":
        text = HEADER + "".join(f"{time},1,1\n" for time in times)
    else:
        text = "".join(json.dumps({"timestamp": time, "input_length": 1, "output_length": 1}) + "\n" for time in times)
    path = write(tmp_path, f"t.{suffix}", text)
    assert len(load_trace(path).rows) == len(times)
    unit = "seconds" if suffix == "csv" else "milliseconds"
    told = f"{path} {doubt}: are its times in another unit? They are read as {unit}"
    assert caplog.messages == ([] if doubt is None else [told])


def test_a_compressed_file_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(AZURE.encode()))
    with pytest.raises(UserError, match="it is compressed: unpack it with gunzip"):
        load_trace(tmp_path / "b.csv.gz")


def test_a_length_pool_keeps_pairs_together(tmp_path: Path) -> None:
    pool = load_lengths(write(tmp_path, "l.csv", "dataset,prompt_tokens,output_tokens\na,10,1\nb,20,2\nc,0,9\n"))
    drawn = pool.sample(200, np.random.default_rng(0))
    assert set(zip(drawn.prompt_tokens.tolist(), drawn.output_tokens.tolist(), strict=True)) == {(10, 1), (20, 2)}
    fitted = pool.fitted(1.5, 16, None)
    assert (fitted.prompt_tokens.tolist(), fitted.output_tokens.tolist()) == ([15, 16], [2, 3])
    with pytest.raises(UserError, match="no row"):
        load_lengths(write(tmp_path, "z.csv", "prompt_tokens,output_tokens\n0,1\n"))


def test_the_package_has_dozens_of_different_prompts() -> None:
    texts = [prompt.text for prompt in package_prompts()]
    assert len(texts) >= 48
    assert len(set(texts)) == len(texts)


def test_prompt_files_need_a_prompt(tmp_path: Path) -> None:
    good = '{"prompt": "Hi there", "output_tokens": 7, "hash_ids": [1]}\n\n{"prompt": "You"}\n'
    first, second = load_prompts(write(tmp_path, "p.jsonl", good))
    assert (first.text, first.output_tokens, first.prefix_ids) == ("Hi there", 7, (1,))
    assert (second.output_tokens, second.prefix_ids) == (None, ())
    (aiperf,) = load_prompts(write(tmp_path, "a.jsonl", '{"text_input": "Hi", "output_length": 3}'))
    assert (aiperf.text, aiperf.output_tokens) == ("Hi", 3)
    bad = {'{"texts": "Hi"}': "keys texts", AIPERF: "give it as --trace", '{"prompt": " "}': "prompt", "": "no prompt"}
    for text, needle in bad.items():
        with pytest.raises(UserError, match=needle):
            load_prompts(write(tmp_path, "bad.jsonl", text))


# -- traces of the load generator --------------------------------------------------------------------------------------


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
