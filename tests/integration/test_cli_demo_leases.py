"""The demo's second part with a model of random weights: three real processes, and nothing of them stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from floodplain.core.errors import UserError
from floodplain.demo.cluster import VerbProcess, neighbourhood, split_cores
from floodplain.demo.leases import describe, serve_scene
from floodplain.demo.leases_load import QUICK_SCENE
from floodplain.engine.config import EngineConfig
from floodplain.observe.lending import draw_lending
from floodplain.observe.plots import to_svg
from floodplain.workload.spec import WorkloadSpec

BASE = EngineConfig(
    model="dummy:tiny-llama", policy="fcfs", swap="none", dtype="float32", kv_memory=2**19, max_model_len=128
)
SAMPLE = WorkloadSpec(num_prompts=60, max_input=40, max_output=64, ignore_eos=True)
SCENE = replace(QUICK_SCENE, lend_after_s=0.5, borrow_s=0.2, double_s=2.5, light_s=3.0, end_s=4.0)


def test_memory_is_lent_while_both_servers_answer() -> None:
    told = serve_scene(BASE, SAMPLE, SCENE, num_resident=SCENE.num_resident, progress=False)
    samples = told["samples"]
    assert told["failed"] == 0 and told["completed"] > SCENE.num_lender_users
    assert told["most_lent_bytes"] > 0
    assert samples["num_tokens"][-1] > samples["num_tokens"][0]
    assert max(samples["pool_bytes"]) > min(samples["pool_bytes"]), "the lender gave way"
    assert samples["time_s"][-1] >= SCENE.end_s
    assert any("MiB were lent" in text for text in describe(told))
    assert "lender: in use" in to_svg(draw_lending(told, "tiny on something"))


def test_a_verb_that_does_not_start_says_why(tmp_path: Path) -> None:
    flags = ["--lend", "auto"]
    with pytest.raises(UserError, match=r"serve did not start: .*no-such-model"):  # noqa: SIM117
        with neighbourhood(tmp_path, "no-such-model", flags, ["--swap", "peer"]):
            pytest.fail("it started")


def test_a_process_that_is_told_to_stop_has_stopped(tmp_path: Path) -> None:
    words = ["coordinator", "--port", "0", "--store", f"sqlite:///{tmp_path / 'a.db'}"]
    with VerbProcess(words, tmp_path / "log") as process:
        assert str(process.wait_ready()["url"]).startswith("http://127.0.0.1:")
        process.ask_to_stop()
        process.stop()
        assert process.exit_status == 0
    with (
        VerbProcess(["serve", "--no-such-flag"], tmp_path / "log") as process,
        pytest.raises(UserError, match="no-such"),
    ):
        process.wait_ready()


def test_the_servers_share_no_core() -> None:
    near, far = split_cores()
    if near is None or far is None:
        pytest.skip("one core, or a system that does not say")
    assert len(near) == len(far) >= 1
    assert not set(near) & set(far)
