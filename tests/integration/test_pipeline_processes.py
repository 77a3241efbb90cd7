"""``floodplain serve --instances 2 --pipeline`` as real processes: one engine's tokens, whichever stage is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support import forks, router_process
from tests.support.refusals import Refuse
from tests.support.router_process import PROMPT, ROOT, START_TIMEOUT_S, VERB, RouterProcess, started
from tests.support.waiting import HANG_S, wait_until

MODEL = "dummy:tiny-deep"
ENGINE = {"dtype": "float32", "kv_memory": 2**22, "max_model_len": 1024}
FLAGS = ["--dtype", "float32", "--kv-memory", "4MiB", "--max-model-len", "1024", "--max-batched-tokens", "512"]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    with started(tmp_path_factory.mktemp("router"), MODEL, [*FLAGS, "--pipeline"]) as one:
        yield one


def one_engine(prompts: list[list[int]], **how: Any) -> list[list[int]]:
    return router_process.one_engine(MODEL, prompts, ENGINE, **how)


@cache
def expected() -> tuple[int, ...]:
    """Tokens of one engine for the prompt of the tests below."""
    return tuple(one_engine([PROMPT])[0])


def wait_formed(router: RouterProcess) -> dict[int, Any]:
    """The rows of both stages, once they serve."""

    def find() -> Any:
        rows = [row for row in router.rows() if row["state"] == "serving" and row["stage"] is not None]
        return len(rows) == 2 and {row["stage"]: row for row in rows}

    found: Any = wait_until(find, timeout_s=START_TIMEOUT_S)
    return dict(found)


def kill(router: RouterProcess, stage: int) -> None:
    """Kill a stage."""
    (row,) = (row for row in router.rows() if row["stage"] == stage)
    os.kill(row["pid"], signal.SIGKILL)


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 5}])
def test_streams_have_the_tokens_of_one_engine(router: RouterProcess, how: dict[str, Any]) -> None:
    prompts = [[(3 + 7 * index + 5 * place) % 256 for place in range(20 + 110 * index)] for index in range(6)]
    with ThreadPoolExecutor(6) as threads:
        streamed = list(threads.map(lambda prompt: router.stream(prompt, max_tokens=40, **how), prompts))
    assert streamed == one_engine(prompts, max_tokens=40, **how)


def test_a_killed_leader_costs_no_token_and_the_pipeline_forms_anew(router: RouterProcess) -> None:
    """For another stage see ``test_an_instance_beside_the_pipeline_takes_its_requests``."""
    before, moved, silent = wait_formed(router), router.listing()["moved_requests"], router.num_silent()
    assert router.stream(do=lambda: kill(router, 0)) == [*expected()]
    assert 1 <= router.listing()["moved_requests"] - moved <= 1 + router.num_silent() - silent
    after = wait_formed(router)
    assert after[1]["pid"] == before[1]["pid"]  # it kept its layers, with a new link
    assert after[0]["pid"] != before[0]["pid"] and after[0]["epoch"] > before[0]["epoch"]


def test_a_stopped_stage_ends_the_pipeline_and_joins_the_next_one_later(router: RouterProcess) -> None:
    stopped = int(wait_formed(router)[1]["pid"])
    num_silent = router.num_silent()
    with ThreadPoolExecutor(1) as threads:
        streaming = threads.submit(router.stream, do=lambda: os.kill(stopped, signal.SIGSTOP))
        try:
            wait_until(lambda: router.num_silent() > num_silent, timeout_s=START_TIMEOUT_S)
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert streaming.result() == [*expected()]
    assert wait_formed(router)[1]["pid"] == stopped


def test_an_instance_beside_the_pipeline_takes_its_requests(router: RouterProcess) -> None:
    before = wait_formed(router)
    flags = ["--join", router.address(), "--instance-token-file", str(router.token_file)]
    beside = forks.Popen([*VERB, "instance", MODEL, *flags, *FLAGS, "--kv-memory", "8MiB", "-q"], cwd=ROOT)
    try:
        row = wait_until(lambda: next((one for one in router.rows() if one["pid"] == beside.pid), None), timeout_s=120)
        assert isinstance(row, dict) and row["stage"] is None
        with ThreadPoolExecutor(4) as threads:
            streaming: list[Future[list[int]]] = []

            def are_both_busy() -> bool:
                if all(one.done() for one in streaming):  # at first, or when a busy machine did not see them run
                    streaming.extend(threads.submit(router.stream, max_tokens=200) for _ in range(4))
                return all(one["requests"] for one in router.rows() if one["stage"] != 1)

            wait_until(are_both_busy)
            kill(router, 1)
            assert [one.result() for one in streaming] == [[*expected()[:200]]] * len(streaming)
        after = wait_formed(router)
        assert after[0]["pid"] == before[0]["pid"] and after[1]["pid"] != before[1]["pid"]
    finally:
        beside.terminate()
        assert beside.wait(HANG_S) == 0


def test_metrics_report_compute_and_idle_times_of_stages(router: RouterProcess) -> None:
    wait_formed(router)
    text = router.http.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    seconds = {
        (sample.labels["stage"], sample.labels["state"]): sample.value
        for sample in samples
        if sample.name == "floodplain_stage_seconds_total"
    }
    assert seconds.keys() == {(stage, state) for stage in "01" for state in ("busy", "bubble")}
    assert min(seconds.values()) > 0
    whole = [seconds[stage, "busy"] + seconds[stage, "bubble"] for stage in "01"]
    assert whole[0] == pytest.approx(whole[1])
    ends = {sample.labels["reason"]: sample.value for sample in samples if sample.name.endswith("instance_ends_total")}
    assert ends["pipeline"] >= 2


def test_a_stage_that_the_router_did_not_start_is_refused_in_one_line(router: RouterProcess) -> None:
    assert router.refuse(*FLAGS, "--stage", "1/2") == (
        "floodplain: the router does not take this instance: the stages of a pipeline are the router's own: "
        "start this instance without --stage\n"
    )


def test_a_signal_lets_streams_end_and_leaves_no_process(router: RouterProcess) -> None:
    assert router.end([row["pid"] for row in wait_formed(router).values()]) == [*expected()]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--pipeline"], "--pipeline needs --instances: without it there is one engine, in this process"),
        (
            ["--instances", "1", "--pipeline"],
            "--pipeline needs --instances 2 or more: each instance is one of its stages",
        ),
        (
            ["--instances", "13", "--pipeline"],
            "dummy:tiny-deep has 12 layers, too few for a pipeline of 13 stages: lower --instances to 12 at most",
        ),
        (
            ["--instances", "2", "--step-profile", "x"],
            "--step-profile x needs --pipeline: nothing else has microbatches",
        ),
        (["--instances", "2", "--pipeline", "--step-profile", "no.json"], "cannot read no.json"),
        (["--instances", "2", "--microbatches", "tokens"], "--microbatches tokens needs --pipeline: nothing else has"),
        (
            ["--instances", "2", "--pipeline", "--policy", "cfs"],
            "--policy cfs does not go with --pipeline: it serves by arrival, since turns are taken in swap space",
        ),
        (["--instances", "2", "--pipeline", "--kv-expansion", "2"], "--kv-expansion 2 does not go with --pipeline: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(flags: list[str], line: str, refuse: Refuse) -> None:
    assert refuse("serve", MODEL, "--port", "0", "-q", *flags).startswith(line)
