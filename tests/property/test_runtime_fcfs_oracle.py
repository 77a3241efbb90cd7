"""FCFS against the rule of vLLM V1, restated over plain lists, decision by decision.

The rule: running requests first, in order; each takes what the token budget leaves, up to its unfinished tokens (here a
prefill leaves the decodes after it one token each, so that a prioritised prompt cannot stop them). If a request finds
no blocks, the latest running ones are preempted, first in the queue, until there are enough blocks or it is itself the
latest. If none was preempted, waiting requests start in order until the budget, the blocks or the places run out.
(https://docs.vllm.ai, scheduler of the V1 engine, without its prefix cache.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.plan import Chunk, StepPlan
from floodplain.core.view import SequenceView
from floodplain.policy import fcfs
from tests.support.controls import Broken, Controls, Fault
from tests.support.driver import Driver, computed
from tests.support.examples import examples
from tests.support.loops import make_loop


@dataclass
class Job:
    """One request of the oracle."""

    number: int
    num_tokens: int
    num_final: int
    num_computed: int = 0
    num_blocks: int = 0
    is_decoding: bool = False


@dataclass
class Oracle:
    """The rule over plain lists."""

    num_free: int
    block_tokens: int
    budget: int
    max_running: int
    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    num_preemptions: int = 0

    def lacks(self, job: Job, num_new: int) -> int:
        return -(-(job.num_computed + num_new) // self.block_tokens) - job.num_blocks

    def take(self, job: Job, num_new: int) -> None:
        num_blocks = self.lacks(job, num_new)
        self.num_free -= num_blocks
        job.num_blocks += num_blocks

    def preempt_latest(self) -> Job:
        victim = self.running.pop()
        self.num_free += victim.num_blocks
        victim.num_blocks = victim.num_computed = 0
        victim.is_decoding = False
        self.waiting.insert(0, victim)
        self.num_preemptions += 1
        return victim

    def want(self, job: Job, budget: int) -> int:
        """Return the tokens of a running job: a prefill leaves one token to each later decode."""
        later = self.running[self.running.index(job) + 1 :]
        reserved = 0 if job.is_decoding else sum(other.is_decoding for other in later)
        return max(0, min(job.num_tokens - job.num_computed, budget - reserved))

    def schedule(self) -> dict[int, int]:
        """Return job number -> tokens, of the next step that computes anything."""
        while self.running or self.waiting:
            chosen, budget, has_preempted = {}, self.budget, False
            for job in list(self.running):
                if job not in self.running or not budget:
                    break
                num_new = self.want(job, budget)
                if not num_new:
                    continue
                while job in self.running and self.lacks(job, num_new) > self.num_free:
                    self.preempt_latest()
                    has_preempted = True
                if job not in self.running:
                    break
                self.take(job, num_new)
                chosen[job.number] = num_new
                budget -= num_new
            while not has_preempted and self.waiting and budget and len(self.running) < self.max_running:
                job = self.waiting[0]
                num_new = min(job.num_tokens, budget)
                if self.lacks(job, job.num_tokens) > self.num_free:
                    break  # its whole prompt must fit, not only its first chunk
                self.running.append(self.waiting.pop(0))
                self.take(job, num_new)
                chosen[job.number] = num_new
                budget -= num_new
            if chosen:
                return chosen
        return {}

    def finish_step(self, chosen: dict[int, int]) -> None:
        for job in list(self.running):
            job.num_computed += chosen.get(job.number, 0)
            if job.number in chosen and job.num_computed == job.num_tokens:
                job.num_tokens += 1
                job.is_decoding = True
                if job.num_tokens == job.num_final:
                    self.num_free += job.num_blocks
                    self.running.remove(job)


REQUESTS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 20), st.integers(1, 12), st.booleans()), min_size=1, max_size=12
)


def compare(
    requests: list[tuple[int, int, int, bool]], num_blocks: int, block_tokens: int, budget: int, max_running: int
) -> Oracle:
    """Run both and compare; ``requests`` are (step of arrival, prompt tokens, max_tokens, ignore_eos)."""
    loop = make_loop(
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        max_model_len=num_blocks * block_tokens,
        max_batched_tokens=budget,
        max_num_seqs=max_running,
        caches_prefixes=False,
    )
    driver = Driver(loop)
    oracle = Oracle(num_blocks, block_tokens, budget, max_running)
    arrivals = sorted(requests, key=lambda r: r[0])
    step = 0
    while arrivals or loop.has_unfinished:
        while arrivals and arrivals[0][0] <= step:
            _, num_prompt, max_tokens, ignore_eos = arrivals.pop(0)
            num_prompt = min(num_prompt, num_blocks * block_tokens - max_tokens)
            prompt = [(31 * step + 7 * position) % 23 for position in range(num_prompt)]
            seq_id = driver.submit(prompt, max_tokens=max_tokens, ignore_eos=ignore_eos)
            oracle.waiting.append(Job(seq_id, num_prompt, num_prompt + len(driver.reference(seq_id))))
        step += 1
        expected = oracle.schedule()
        plan = driver.plan()
        assert (computed(plan) if isinstance(plan, StepPlan) else {}) == expected
        assert loop.counters.preemptions["recompute"] == oracle.num_preemptions
        assert loop.state.ledger.num_available == oracle.num_free
        assert [seq.seq_id for seq in loop.state.running] == [job.number for job in oracle.running]
        if isinstance(plan, StepPlan):
            driver.complete()
            oracle.finish_step(expected)
        assert step < 2000
    driver.check_at_rest()
    return oracle


@settings(max_examples=examples(70), deadline=None)
@given(
    requests=REQUESTS,
    num_blocks=st.integers(5, 16),
    block_tokens=st.sampled_from([4, 3, 5, 8]),
    budget=st.integers(1, 24),
    max_running=st.integers(1, 6),
)
def test_every_decision_is_that_of_the_rule(
    requests: list[tuple[int, int, int, bool]], num_blocks: int, block_tokens: int, budget: int, max_running: int
) -> None:
    compare(requests, num_blocks, block_tokens, budget, max_running)


CROWD = [(step, 3 + step % 4, 9, True) for step in range(10)]


def test_the_oracle_preempts_at_all() -> None:
    assert compare(CROWD, num_blocks=6, block_tokens=4, budget=12, max_running=5).num_preemptions > 3


# -- negative controls -----------------------------------------------------------------------------------------------


CONTROLS = Controls()


@CONTROLS.breaks(fcfs._Step, "_can_take")
def holds_back_instead_of_preempting(_: Broken, self: fcfs._Step, num_blocks: int, index: int) -> bool:
    self._num_kept = len(self._view.running) if num_blocks <= self._blocks else index
    return num_blocks <= self._blocks


@CONTROLS.patches()
def admits_in_spite_of_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcfs._Step, "is_short_of_blocks", property(lambda s: False, lambda s, value: None), False)


@CONTROLS.breaks(fcfs._Step, "admit_waiting")
def skips_the_first_that_does_not_fit(admit: Broken, self: fcfs._Step) -> None:
    admit(self)
    if not self._admissions and len(self._view.waiting) > 1 and self._budget and self._blocks:
        self._admissions.append(Chunk(self._view.waiting[1].seq_id, 1))


CONTROLS.add("never_runs_what_it_started", fcfs._Step, "schedule_running", lambda _, self: None)


@CONTROLS.breaks(fcfs._Step, "_schedule_chunk")
def chunks_without_a_budget(_: Broken, self: fcfs._Step, index: int, row: SequenceView) -> None:
    self._chunks.append(Chunk(row.seq_id, row.num_remaining))


@pytest.mark.parametrize("fault", CONTROLS)
def test_a_policy_is_noticed_that(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        compare(CROWD, num_blocks=6, block_tokens=4, budget=5, max_running=5)
        compare(CROWD, num_blocks=8, block_tokens=4, budget=12, max_running=5)
