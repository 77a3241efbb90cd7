"""``floodplain serve --instances 2`` as real processes, killed and stopped under streaming clients."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from floodplain import LLM, SamplingParams
from floodplain.cli.main import main
from tests.support import forks, router_process
from tests.support.process_tree import is_alive
from tests.support.router_process import PROMPT, ROOT, START_TIMEOUT_S, VERB, RouterProcess, started
from tests.support.waiting import HANG_S, wait_until

MODEL = "dummy:tiny-llama"
ENGINE = {"dtype": "float32", "kv_memory": 2**20, "max_model_len": 1024}
FLAGS = ["--dtype", "float32", "--kv-memory", "1MiB", "--max-model-len", "1024"]
LONG = 900
"""Tokens of a stream that must not end before its instance is killed or stopped."""


CAUSE = 7
"""First token of a prompt that ends its instance, under ``HOOK``."""
HOOK = """
import os, sys, time
from pathlib import Path

def end_before_step(engine):
    if any(seq.request.prompt_token_ids[0] == {cause} for seq in engine._alive.values()):
        while not Path({gate!r}).exists():
            time.sleep(0.005)
        os._exit(70)
    return step(engine)

if "instance" in sys.orig_argv:
    from floodplain.engine.shell import Engine
    step, Engine.step = Engine.step, end_before_step
"""
"""An instance exits before its first step with the cause, once the gate is open."""


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    with started(tmp_path_factory.mktemp("router"), MODEL, FLAGS) as one:
        yield one


def one_engine(prompts: list[list[int]], **how: Any) -> list[list[int]]:
    return router_process.one_engine(MODEL, prompts, ENGINE, **how)


def test_streams_have_the_tokens_of_one_engine_and_use_both_instances(router: RouterProcess) -> None:
    prompts = [[3 + index, *PROMPT] for index in range(6)]
    with ThreadPoolExecutor(6) as threads:
        streamed = list(threads.map(lambda prompt: router.stream(prompt, max_tokens=40), prompts))
    assert streamed == one_engine(prompts, max_tokens=40)
    wait_until(lambda: all(row["generated_tokens"] >= 40 for row in router.rows()))


def test_a_kill_in_the_middle_of_a_stream_costs_no_token(router: RouterProcess) -> None:
    how: dict[str, Any] = {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.3, "max_tokens": LONG}
    before = {row["epoch"] for row in router.wait_full()}
    moved, silent = router.listing()["moved_requests"], router.num_silent()
    assert [router.stream(do=router.kill_busy, **how)] == one_engine([PROMPT], **how)
    assert 1 <= router.listing()["moved_requests"] - moved <= 1 + router.num_silent() - silent
    after = {row["epoch"] for row in router.wait_full()}  # a new instance has joined
    assert len(before & after) < 2 and max(after) > max(before)


def test_a_stopped_instance_loses_its_requests_and_joins_anew_later(router: RouterProcess) -> None:
    router.wait_full()
    silent, stopped = router.num_silent(), list[Any]()

    def stop() -> None:
        stopped.append(router.busy())
        os.kill(stopped[0]["pid"], signal.SIGSTOP)

    try:
        tokens = router.stream(do=stop, max_tokens=LONG)  # ends, although its instance is silent and still connected
    finally:
        os.kill(stopped[0]["pid"], signal.SIGCONT)
    assert [tokens] == one_engine([PROMPT], max_tokens=LONG)
    rows = router.wait_full()
    (again,) = (row for row in rows if row["pid"] == stopped[0]["pid"])
    assert again["epoch"] > stopped[0]["epoch"] and router.num_silent() > silent
    assert [router.stream()] == one_engine([PROMPT])


def test_prompts_are_scored_and_answers_structured_behind_a_router(router: RouterProcess) -> None:
    router.wait_full()
    done = router.client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=2, echo=True, logprobs=1)
    scores = done.choices[0].logprobs
    with LLM(MODEL, **ENGINE) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=1)
        expected = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)[0].prompt_logprobs
    assert scores and scores.token_logprobs and expected and scores.token_logprobs[0] is None
    pairs = zip(scores.token_logprobs[1:3], expected, strict=True)
    assert max(abs((value or 0) - one.chosen) for value, one in pairs) < 1e-4
    choice: Any = {"structured_outputs": {"choice": ["left", "right"]}}
    found = router.client.completions.create(model=MODEL, prompt="a", n=3, seed=3, max_tokens=9, extra_body=choice)
    assert {one.text for one in found.choices} <= {"left", "right"} and len(found.choices) == 3


def test_an_unlike_instance_is_refused_in_one_line(router: RouterProcess) -> None:
    assert router.refuse(*FLAGS, "--dtype", "bfloat16") == (
        "floodplain: the router does not take this instance: --dtype bfloat16 is not the others' float32: "
        "start it with --dtype float32\n"
    )


def test_refusals_keep_their_status(router: RouterProcess) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        router.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="not in the vocabulary"):
        router.client.completions.create(model=MODEL, prompt=[3, 100000], max_tokens=5)


def test_metrics_are_per_instance_and_in_sum(router: RouterProcess, capsys: pytest.CaptureFixture[str]) -> None:
    rows = router.wait_full()
    with ThreadPoolExecutor(6) as pool:
        num_tokens = sum(len(tokens) for tokens in pool.map(lambda _: router.stream(), range(6)))

    def read() -> tuple[list[Sample], dict[str, float]]:
        families = text_string_to_metric_families(router.http.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        return samples, {sample.name: sample.value for sample in samples if set(sample.labels) == {"model_name"}}

    wait_until(lambda: read()[1]["floodplain_generation_tokens_total"] >= num_tokens >= 6 * 40)
    samples, values = read()
    running = [s for s in samples if s.name == "floodplain_instance_requests_running"]
    assert {sample.labels["instance"] for sample in running} == {str(row["epoch"]) for row in rows}
    assert values["floodplain_time_to_first_token_seconds_count"] >= 6
    assert main(["instances", "--base-url", router.url]) == 0
    shown = capsys.readouterr().out
    assert all(str(row["pid"]) in shown for row in rows) and "requests moved: " in shown
    assert main(["instances", "--base-url", "http://127.0.0.1:1"]) == 1


def test_a_signal_lets_streams_end_and_leaves_no_process(router: RouterProcess) -> None:
    assert [router.end([row["pid"] for row in router.wait_full()])] == one_engine([PROMPT])


def test_a_signal_while_instances_load_ends_all() -> None:
    """The instance is executed, not forked, so that it loads for seconds."""
    command = [*VERB, "serve", MODEL, "--instances", "1", *FLAGS, "--port", "0", "-q"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        pids = [int(pid) for pid in wait_until(lambda: children.read_text().split(), timeout_s=START_TIMEOUT_S)]
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (0, "", "")
    assert not any(is_alive(pid) for pid in pids)


def test_an_instance_that_cannot_start_is_one_line() -> None:
    command = [*VERB, "serve", MODEL, "--instances", "1", "--kv-memory", "64KiB", "--port", "0", "-q"]
    command += ["--max-model-len", "100000"]
    done = forks.run(command, START_TIMEOUT_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("floodplain: instance 0 did not start: ") and done.stderr.count("\n") == 1


def test_a_request_that_ends_its_instances_fails_alone(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    (tmp_path / "sitecustomize.py").write_text(HOOK.format(cause=CAUSE, gate=str(gate)))
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    router = RouterProcess(tmp_path, MODEL, FLAGS, 1, {"PYTHONPATH": paths})
    others = [[20 + index, *PROMPT] for index in range(3)]

    def ask(prompt: list[int]) -> list[int]:
        with openai.OpenAI(base_url=f"{router.url}/v1", api_key="any", timeout=2 * HANG_S) as client:
            extra = {"ignore_eos": True, "return_token_ids": True}
            done = client.completions.create(model=MODEL, prompt=prompt, max_tokens=9, temperature=0, extra_body=extra)
        return list(done.choices[0].token_ids)  # type: ignore[attr-defined]

    def wait_placed(count: int) -> None:
        wait_until(lambda: sum(row["requests"] for row in router.rows()) == count, timeout_s=START_TIMEOUT_S)

    try:
        router.wait_full()
        with ThreadPoolExecutor(4) as threads:
            cause = threads.submit(ask, [CAUSE, *PROMPT])
            wait_placed(1)
            asked = [threads.submit(ask, prompt) for prompt in others]
            wait_placed(4)
            gate.touch()
            assert [one.result() for one in asked] == one_engine(others, max_tokens=9)
            with pytest.raises(openai.InternalServerError, match="3 instances in a row ended") as caught:
                cause.result()
        assert caught.value.code == "given_up"
        assert router.listing()["ends"]["hung_up"] == 3  # the client did not try again
        assert "3 instances in a row ended under a request of" in router.log.read_text()
    finally:
        router.close()
