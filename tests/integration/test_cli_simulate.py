"""``floodplain simulate``: a scenario, a sweep, and a comparison with a run that was recorded as vLLM's are."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from floodplain.cli.main import main
from floodplain.sim.compare import read_run
from floodplain.sim.prediction import Prediction, predict
from floodplain.sim.scenario import read_scenario
from floodplain.workload.traces import TraceRow
from tests.support.refusals import Refuse

EXAMPLE = Path(__file__).parents[2] / "examples" / "simulate" / "burst.yaml"
SMALL = ["workload.num_prompts=30", "workload.burst_start=2", "workload.burst_duration=3", "engine.kv_blocks=300"]
ROWS = [TraceRow(0.3 * place, 200 + 37 * place % 900, 1 + 11 * place % 90) for place in range(60)]
SETTING = ["model=llama-3.1-8b", "device=rtx4090", "engine.policy=fcfs", "engine.scheduling=async"]


def record(folder: Path, prediction: Prediction, factor: float = 1.0) -> Path:
    """Write a prediction as the folder of a real run, all times after arrivals ``factor`` times as long."""
    folder.mkdir()
    with (folder / "requests.jsonl").open("w") as file:
        for number, (row, life) in enumerate(zip(ROWS, prediction.lifecycles, strict=True)):
            queued_s = 0.2 * (number % 2) / factor  # vLLM looks at its queue between steps
            moments = (queued_s, life.token_times_s[0] - row.arrival_s, life.token_times_s[-1] - row.arrival_s)
            names = ("queued_ts", "first_token_ts", "last_token_ts")
            times = {name: 500.0 + row.arrival_s + factor * when for name, when in zip(names, moments, strict=True)}
            line = {
                "input_toks": row.prompt_tokens,
                "output_toks": row.output_tokens,
                "arrival_time": 1e9 + row.arrival_s,
            }
            file.write(json.dumps(line | times) + "\n")
    meta = {
        "model": "meta-llama/Llama-3.1-8B", "engine_kwargs": {"max_num_seqs": 16, "max_num_batched_tokens": 512},
        "kv_cache": {"num_gpu_blocks": 401}, "hardware": {"device_name": "NVIDIA GeForce RTX 4090"},
    }  # fmt: skip
    (folder / "meta.json").write_text(json.dumps(meta))
    timeline: Any = prediction.result["floodplain"]
    with (folder / "timeseries.csv").open("w") as table:
        columns = timeline["timeline"]
        lines = zip(columns["time_s"], columns["num_running"], columns["num_waiting"], strict=True)
        csv.writer(table).writerows([("t", "running", "waiting"), *lines])
    return folder


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    limits = ["engine.max_num_seqs=16", "engine.max_batched_tokens=512", "engine.kv_blocks=400"]
    return predict(read_scenario(None, [*SETTING, *limits]), ROWS)


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main(["simulate", *argv, "--format", "json", "--quiet"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_scenario_gives_a_table_a_result_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "burst.json"
    assert main(["simulate", str(EXAMPLE), "--set", *SMALL, "--out", str(out), "--plot"]) == 0
    shown, told = capsys.readouterr()
    assert f"floodplain: pictures are in {tmp_path / 'burst-plots'}\n" in told
    result = json.loads(out.read_text())
    assert "goals met (%)" in shown and "300 KV blocks an instance; a step's time: fit to kernels" in shown
    assert result["backend"] == "simulator" and result["completed"] == 30
    assert result["floodplain"]["config"]["engine"]["kv_blocks"] == 300
    assert {path.name for path in (tmp_path / "burst-plots").iterdir()} >= {"ttft.png", "strip.png", "timeline.png"}


def test_a_chrome_trace_has_every_request_and_its_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.json"
    result = run_json(capsys, str(EXAMPLE), "--set", *SMALL, "--trace-out", str(out))
    events = json.loads(out.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    requests = {event["tid"]: event for event in spans if event["name"] == "request"}
    stays = [event for event in spans if event["name"] == "on the device"]
    assert len(requests) == 30 and len(stays) == sum(map(len, result["floodplain"]["residence"]["on_device_s"]))
    assert all(
        requests[stay["tid"]]["ts"] - 1 <= stay["ts"]
        and stay["ts"] + stay["dur"] <= requests[stay["tid"]]["ts"] + requests[stay["tid"]]["dur"] + 1
        for stay in stays
    )
    assert sum(event["name"] == "first token" for event in events) == 30
    assert {event["name"] for event in events if event["ph"] == "C"} >= {"num_running", "kv_used_blocks"}


def test_a_sweep_has_a_column_for_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, str(EXAMPLE), "--set", *SMALL, "--sweep", "engine.policy=fcfs,timely")
    assert [each["name"] for each in result["runs"]] == ["engine.policy=fcfs", "engine.policy=timely"]
    assert [each["floodplain"]["config"]["engine"]["policy"] for each in result["runs"]] == ["fcfs", "timely"]


def test_a_summary_is_shown_and_nothing_reads_its_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refuse: Refuse
) -> None:
    assert main(["simulate", str(EXAMPLE), "--set", *SMALL, "detailed=false"]) == 0
    assert "goals met (%)" in capsys.readouterr().out
    for flag in ("--plot", f"--trace-out={tmp_path / 'trace.json'}"):
        out = str(tmp_path / "out.json")
        told = refuse("simulate", str(EXAMPLE), "--sweep", "detailed=true,false", "--out", out, flag)
        assert told == f"{flag.partition('=')[0]} reads what became of each request: leave detailed=false out"
    assert not list(tmp_path.iterdir())


def test_tenants_and_recalls_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    loads = ["tenants.calm={request_rate: 1, num_prompts: 5}", "tenants.loud={request_rate: 20, num_prompts: 20}"]
    lender = ["lender.memory=8GB", "lender.busy=[[1, 3]]", "instances=2"]
    sets = ["model=llama-3.1-8b", "device=rtx4090", "engine.kv_blocks=300", *loads, *lender]
    assert main(["simulate", "--set", *sets]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\nsimulated +goals met.*\n.*\ncalm .* 5\nloud .* 20\n", shown)
    assert "simulated: lent memory was recalled 2 times, in " in shown


@pytest.mark.parametrize(("factor", "wanted"), [(1.0, 0.0), (0.8, 25.0)])
def test_a_comparison_has_the_errors_in_per_cent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prediction: Prediction, factor: float, wanted: float
) -> None:
    folder = record(tmp_path / "run", prediction, factor)
    errors = run_json(capsys, "--compare", str(folder), "--set", "engine.kv_blocks=400")["compare"]
    for name in ("ttft", "tpot", "e2e"):
        assert errors[name] == pytest.approx(dict.fromkeys(("mean", "p50", "p90", "p99"), wanted), abs=0.01)
    assert errors["kv_blocks"] == 0.0
    assert errors["mean_difference"] == pytest.approx({"running": 0.0, "waiting": 0.0}, abs=1e-3)
    assert (errors["makespan"] > 1.0) == (wanted > 0)


def test_a_run_that_tells_less_needs_a_scenario_that_tells_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refuse: Refuse, prediction: Prediction
) -> None:
    folder = record(tmp_path / "run", prediction)
    told = refuse("simulate", "--compare", str(folder), "--set", "detailed=false")
    assert told.startswith("--compare reads what became of each request")
    (folder / "meta.json").write_text("{}")
    (folder / "timeseries.csv").unlink()
    assert "model: say which; there are" in refuse("simulate", "--compare", str(folder))
    limits = ["engine.max_num_seqs=16", "engine.max_batched_tokens=512", "engine.kv_blocks=400"]
    errors = run_json(capsys, "--compare", str(folder), "--set", *SETTING, *limits)["compare"]
    assert errors["makespan"] == pytest.approx(0.0, abs=0.01)
    assert errors["kv_blocks"] is None and errors["mean_difference"] is None


def _drop_a_time(folder: Path) -> None:
    text = (folder / "requests.jsonl").read_text()
    (folder / "requests.jsonl").write_text(text.replace('"first_token_ts"', '"first"', 1))


def test_a_run_of_single_tokens_has_no_error_of_tpot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prediction: Prediction
) -> None:
    folder = record(tmp_path / "run", prediction)
    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    single = [row | {"output_toks": 1, "last_token_ts": row["first_token_ts"]} for row in rows]
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, single)))
    assert main(["simulate", "--compare", str(folder), "--set", "engine.kv_blocks=400"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"TPOT( +-){4}\n", shown) and re.search(r"E2E( +[+-]\d+\.\d){4}\n", shown)


def _swap_times(folder: Path) -> None:
    text = (folder / "requests.jsonl").read_text()
    for old, new in (("first_token_ts", "x"), ("last_token_ts", "first_token_ts"), ("x", "last_token_ts")):
        text = text.replace(f'"{old}"', f'"{new}"')
    (folder / "requests.jsonl").write_text(text)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_swap_times, "first_token_ts must not be after last_token_ts"),
        (_drop_a_time, "requests.jsonl line 1: first_token_ts must be a number"),
        (lambda folder: (folder / "requests.jsonl").write_text(""), "requests.jsonl has no request"),
        (lambda folder: (folder / "timeseries.csv").write_text("t,busy\n0,1\n"), "has no column running, waiting"),
        (lambda folder: (folder / "meta.json").unlink(), "meta.json"),
        (lambda folder: (folder / "meta.json").write_text('{"hardware": "A100"}'), "hardware must be an object"),
    ],
)
def test_a_spoilt_run_is_refused_in_one_line(
    tmp_path: Path, refuse: Refuse, prediction: Prediction, spoil: Callable[[Path], object], words: str
) -> None:
    folder = record(tmp_path / "run", prediction)
    spoil(folder)
    assert words in refuse("simulate", "--compare", str(folder))


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_a_run_tells_its_device_and_what_its_pool_depends_on(
    tmp_path: Path, prediction: Prediction, device: str, name: str | None
) -> None:
    folder = record(tmp_path / "run", prediction)
    pool = {"gpu_memory_utilization": 0.8, "block_size": 32, "enable_prefix_caching": False}
    (folder / "meta.json").write_text(json.dumps({"hardware": {"device_name": device}, "kv_cache": pool}))
    (folder / "timeseries.csv").write_text("t,running,waiting\n")
    run = read_run(folder)
    assert [each for each in run.sets if each.startswith("device=")] == ([] if name is None else [f"device={name}"])
    engine = read_scenario(None, ["model=llama-3.1-8b", "device=h200", *run.sets]).engine
    assert (engine.utilisation, engine.block_tokens, engine.prefix_cache) == (0.8, 32, False) and run.series == {}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "name a scenario"),
        (["nowhere.yaml"], "nowhere.yaml"),
        ([str(EXAMPLE), "--plot"], "give --out FILE too"),
        ([str(EXAMPLE), "--set", "engine.policy=lifo"], "engine.policy: Input should be"),
        ([str(EXAMPLE), "--compare", "x", "--sweep", "a=1,2"], "leave --sweep out"),
    ],
)
def test_wrong_flags_are_refused(refuse: Refuse, argv: list[str], words: str) -> None:
    assert words in refuse("simulate", *argv)


@pytest.mark.parametrize("gpu", ["rtx4090", "rtxpro6000"])
@pytest.mark.parametrize("cost", ["kernels", "fit"])
def test_real_runs_under_load_are_predicted(
    shared_dir: Path, capsys: pytest.CaptureFixture[str], gpu: str, cost: str
) -> None:
    runs = shared_dir / "data" / "vllm_gpu_runs"
    sets = ["device=" + gpu] + [f"cost.kernels={runs}/kernels/{gpu}_llama-3.1-8b"] * (cost == "kernels")
    errors = run_json(capsys, "--compare", f"{runs}/{gpu}_llama-3.1-8b", "--set", *sets)["compare"]
    for name in ("ttft", "tpot", "e2e"):
        assert abs(errors[name]["mean"]) < 5 and abs(errors[name]["p50"]) < 6 and abs(errors[name]["p99"]) < 10
    assert abs(errors["makespan"]) < 3 and abs(errors["kv_blocks"] or 0.0) < 2


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_the_processes_of_a_sweep_end_with_the_command(ending: signal.Signals) -> None:
    """Ctrl-C reaches all of them while they start; a kill reaches the command alone. They hold standard error open."""
    command = [sys.executable, "-m", "floodplain", "simulate", str(EXAMPLE), "--sweep", "workload.seed=1,2,3,4,5,6"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stderr is not None
        try:
            said = b""
            while b"0/6" not in said:  # the first processes have been started
                said += process.stderr.read1()
            (os.killpg if ending == signal.SIGINT else os.kill)(process.pid, ending)
            _, rest = process.communicate(timeout=60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == (130 if ending == signal.SIGINT else -ending)
    assert ending != signal.SIGINT or b"Traceback" not in rest
