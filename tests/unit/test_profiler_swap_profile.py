"""Swap profiles: the largest need of a burst, plus prefixes and contexts; the paper's figures."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.cost.step_time import StepCost
from floodplain.engine.config import EngineConfig
from floodplain.files.profile import Profile
from floodplain.model.weights.open_model import open_model
from floodplain.profiler.flags import SwapProfileConfig
from floodplain.profiler.swap_profile import NUM_BEFORE, Bursts, BurstServer, burst_requests, profile_swap
from floodplain.profiler.targets import Load
from floodplain.workload.spec import WorkloadSpec

BURSTS = Bursts(stable_rate=2.0, factors=(2.0, 3.0), seconds=10.0, num_tries=2, seed=7)


class Told:
    """A burst server whose tries need the given bytes, in order."""

    def __init__(self, needs: list[int]) -> None:
        self.needs = iter(needs)

    def bytes_of(self, num_prompts: int, num_tokens: int) -> int:
        return 1000 * num_prompts * num_tokens

    def try_burst(self, bursts: Bursts, factor: float, seed: int) -> dict[str, Any]:
        return {"factor": factor, "seed": seed, "needs_bytes": next(self.needs)}


def profile(needs: list[int], subject: str = "tiny", **more: Any) -> Profile:
    options: dict[str, Any] = {"cached": (0, 0), "long": (0, 0), "machine": "m", "settings": {}, **more}
    return profile_swap(cast(Any, Told(needs)), BURSTS, 3.0, subject=subject, **options)


def test_the_largest_need_of_the_chosen_burst_counts() -> None:
    found = profile([900, 100, 300, 500])
    assert found.result["needs_bytes"] == found.result["burst_bytes"] == 500
    assert found.result["bursts"] == {"2x_bytes": 900, "3x_bytes": 500}
    assert (found.errors["least_bytes"], found.errors["most_bytes"]) == (300, 500)
    assert [(row["factor"], row["seed"]) for row in found.tries] == [(2.0, 7), (2.0, 8), (3.0, 7), (3.0, 8)]
    assert (found.spare_bytes, found.is_virtual) == (-500, True)


def test_prefixes_and_long_contexts_come_beside_the_burst() -> None:
    result = profile([0, 0, 300, 500], cached=(3, 2), long=(1, 4)).result
    assert (result["cached_bytes"], result["long_bytes"], result["needs_bytes"]) == (6000, 4000, 10_500)


def test_the_papers_figures_stand_beside_its_own_model_alone() -> None:
    rows = profile([1, 2, 3, 4], subject="dummy:yi-34b-200k").tries
    assert [row["paper_bytes"] for row in rows] == [6 * 10**9] * 2 + [15 * 10**9] * 2
    assert all("paper_bytes" not in row for row in profile([1, 2, 3, 4]).tries)


@given(rate=st.floats(0.5, 20), factor=st.floats(1, 6))
def test_requests_arrive_at_the_stable_rate_before_and_after_a_burst(rate: float, factor: float) -> None:
    """Nearly even gaps give each phase its number of requests."""
    bursts = Bursts(stable_rate=rate, factors=(factor,), seconds=20.0, num_tries=1, seed=0)
    load = Load(WorkloadSpec(burstiness=1e6, max_input=2, max_output=2))
    tokenizer = open_model("dummy:tiny-llama").load_tokenizer()
    asked = burst_requests(load, tokenizer, bursts.phases(factor), seed=0)
    ends_s = np.cumsum([NUM_BEFORE / rate, 20.0, 20.0])
    counts = np.histogram([one.arrival_s for one in asked], bins=[0.0, *ends_s[:-1], np.inf])[0]
    assert counts == pytest.approx([NUM_BEFORE, factor * rate * 20, rate * 20], abs=2.5)


def test_whole_blocks_of_the_longest_prompt_count_for_each() -> None:
    config = EngineConfig(model="dummy:tiny-llama", kv_memory=2**20)
    server = BurstServer(config, open_model(config.model), cast(Any, None), Load(WorkloadSpec()))
    assert server.block_bytes == 16 * 2 * 2 * 2 * 16 * 2
    assert server.bytes_of(3, 17) == 3 * 2 * server.block_bytes
    assert server.bytes_of(0, 0) == 0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({}, "--steps FILE or --step-line"),
        ({"step_line": (0.1, 0.1)}, "--step-line takes three numbers"),
        ({"step_line": (0.1, -0.1, 0.1)}, "--step-line takes three numbers"),
        ({"bursts": (0.5, 3.0)}, "--bursts must be between 1 and"),
        ({"burst": 4.0}, "--burst 4 must be one of --bursts"),
        ({"burst_seconds": 0.0}, "--burst-seconds must be above 0"),
        ({"tries": 0}, "--tries must be between 1 and 100"),
        ({"cached_prompts": 3}, "--cached-prompts goes with --cached-tokens: give both"),
        ({"long_contexts": 1, "long_tokens": -1}, "--long-contexts and --long-tokens must be from 0 on"),
    ],
)
def test_flags_out_of_range_are_refused(flags: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        SwapProfileConfig(**({} if not flags or "step_line" in flags else {"step_line": (0.1, 0.1, 0.1)}), **flags)


def test_a_burst_of_which_nothing_can_be_served_needs_no_zero_bytes() -> None:
    config = EngineConfig(model="dummy:tiny-llama", kv_memory=2**20, max_model_len=16)
    load = Load(WorkloadSpec(length_scale=1000.0, max_input=99, max_output=99))
    server = BurstServer(config, open_model(config.model), StepCost(base_s=0.01), load)
    with pytest.raises(UserError, match=r"requests of a burst are refused: .*max_model_len"):
        server.try_burst(BURSTS, 3.0, seed=7)
