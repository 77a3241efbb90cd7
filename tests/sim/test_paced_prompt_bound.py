"""``paced`` where prompts are most of the work serves as FCFS does: first tokens first would cost too much.

A request is then nearly done when it has its first token. A policy that computes all prompts first has many such
requests waiting for their last few tokens; and a share of a step is not enough for prompts that are most of the work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.plan import Reason
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from tests.support.bursts import Machine, Recorder, Run, burst, make_burst
from tests.support.examples import examples

MACHINE = Machine(
    num_blocks=200,
    block_tokens=16,
    num_slots=20_000,
    block_s=5e-5,
    max_num_seqs=256,
    max_batched_tokens=1024,
    max_model_len=1024,
)
FIRST = SharingSettings(prompt_share=1.0)
"""First tokens first, whatever the cost of prompts."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Equal requests at ``factor`` times the rate that the machine can serve.

    A few arrive before them, with ``tokens_ahead`` output tokens if that is set.
    """

    num_prompt: int
    max_tokens: int
    factor: float = 1.5
    num_requests: int = 100
    tokens_ahead: int | None = None

    @property
    def costs_s(self) -> tuple[float, float]:
        """Return the seconds of (a prompt, the rest of a request) on a full device."""
        line, num_streams = MACHINE.line, MACHINE.num_blocks * 16 / (self.num_prompt + self.max_tokens)
        return self.num_prompt * line.prefill_token_s, self.max_tokens * (line.base_s / num_streams + line.decode_s)

    @property
    def prompt_share(self) -> float:
        return self.costs_s[0] / sum(self.costs_s)

    def run(self, name: str, sharing: SharingSettings) -> tuple[Run, set[Reason | None]]:
        """Serve a few requests and then the load; return the run, and the reasons of its decisions."""
        recorder = Recorder(make_policy(name, sharing))
        make = {"num_prompt": self.num_prompt, "max_tokens": self.max_tokens}
        requests = make_burst(self.num_requests, interval_s=sum(self.costs_s) / self.factor, first_s=5.0, **make)
        ahead = [
            replace(one, prompt_token_ids=tuple(token + 10**6 for token in one.prompt_token_ids))
            for one in make_burst(8, interval_s=0.5, **make | {"max_tokens": self.tokens_ahead or self.max_tokens})
        ]
        run = burst(MACHINE, recorder, [*ahead, *requests])
        return run, {decision.reason for _, _, decision in recorder.seen}


def mean_ttft_s(run: Run) -> float:
    return fmean(one.ttft_s or 0.0 for one in run.lifecycles.values())


def mean_e2e_s(run: Run) -> float:
    return fmean(one.e2e_s or 0.0 for one in run.lifecycles.values())


PROMPT_BOUND = st.builds(
    Load,
    num_prompt=st.integers(200, 800),
    max_tokens=st.integers(8, 48),
    factor=st.floats(1.1, 2.5),
).filter(lambda load: load.prompt_share > 0.6)


@pytest.mark.slow
def test_where_prompts_are_most_of_the_work_it_is_about_as_good_as_fcfs() -> None:
    seen: set[Reason | None] = set()

    @settings(max_examples=examples(8))
    @given(PROMPT_BOUND)
    def law(load: Load) -> None:
        (run, reasons), (line, _) = load.run("paced", SharingSettings()), load.run("fcfs", SharingSettings())
        assert run.elapsed_s <= 1.05 * line.elapsed_s
        assert mean_ttft_s(run) <= 1.1 * mean_ttft_s(line)
        assert mean_e2e_s(run) <= 1.1 * mean_e2e_s(line)
        seen.update(reasons)

    law()
    assert Reason.PROMPT_BOUND in seen


LONG = Load(num_prompt=600, max_tokens=32, factor=1.5)


@pytest.mark.slow
def test_first_tokens_first_is_not() -> None:
    (run, reasons), (line, _) = LONG.run("paced", FIRST), LONG.run("fcfs", FIRST)
    assert LONG.prompt_share > 0.6
    assert run.elapsed_s > 1.2 * line.elapsed_s
    assert mean_ttft_s(run) > 1.3 * mean_ttft_s(line)
    assert mean_e2e_s(run) > 1.3 * mean_e2e_s(line)
    assert Reason.PROMPT_BOUND not in reasons


SHORT = Load(num_prompt=48, max_tokens=96, factor=1.5, num_requests=150)


@pytest.mark.slow
def test_where_prompts_are_little_of_the_work_nothing_changes() -> None:
    (run, reasons), (first, _) = SHORT.run("paced", SharingSettings()), SHORT.run("paced", FIRST)
    assert SHORT.prompt_share < 0.3
    assert Reason.PROMPT_BOUND not in reasons
    assert [one.token_times_s for one in run.lifecycles.values()] == [
        one.token_times_s for one in first.lifecycles.values()
    ]
    assert run.counters.preemptions["swap"] > 100
    assert mean_ttft_s(run) < 0.2 * mean_ttft_s(SHORT.run("fcfs", FIRST)[0])


@pytest.mark.slow
def test_a_few_short_requests_do_not_stand_for_the_load() -> None:
    """Such requests occur if a server is warmed up, and at the begin of a load, when short requests end first."""
    run, reasons = replace(SHORT, tokens_ahead=2).run("paced", SharingSettings())
    assert Reason.PROMPT_BOUND not in reasons
    assert run.counters.preemptions["swap"] > 100
