"""A decision is repeated only while its policy would decide the same: all plans are equal to those of a policy asked
in every step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.backups import BackupTable
from floodplain.core.blocks import BlockLedger
from floodplain.core.plan import StepPlan
from floodplain.core.request import Request
from floodplain.core.tiers import Link, SlotLedger, Tier
from floodplain.core.view import View
from floodplain.cost.step_time import StepCost, StepTimer
from floodplain.policy.base import Standing
from floodplain.policy.registry import POLICIES, make_policy
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopConfig, LoopState
from floodplain.sim.environment import Environment
from floodplain.sim.instance import VirtualInstance
from floodplain.sim.links import VirtualLinks
from floodplain.sim.virtual_engine import DUMMY_TOKEN
from tests.support.bursts import Recorder
from tests.support.examples import examples
from tests.support.loops import make_request

BLOCK_BYTES = 2**20
COST = StepCost(base_s=0.02, decode_s=1e-4, prefill_token_s=2e-4, context_token_s=1e-6)


class Told(Recorder):
    """A policy with what it says of its decisions; a ``Recorder`` does not say when they stand."""

    def stands(self, view: View) -> Standing | None:
        found: Standing | None = self.inner.stands(view)  # type: ignore[attr-defined]
        return found


class Rash(Recorder):
    """A policy that says of every decision that it stands."""

    def stands(self, view: View) -> Standing | None:
        return Standing()


@dataclass
class Load:
    """Requests, some of which share their prompts, and a device that holds a few of them."""

    seed: int
    num_blocks: int
    num_slots: int
    max_num_seqs: int
    caches: bool
    is_async: bool
    requests: list[Request] = field(init=False)

    def __post_init__(self) -> None:
        dice, now = Random(self.seed), 0.0
        self.requests = []
        for _ in range(dice.randint(2, 14)):
            now += dice.choice([0.0, dice.expovariate(5.0), dice.expovariate(0.5)])
            shared = tuple(range(100, 100 + dice.choice([0, 4, 8, 13])))
            kinds = [1, 6, 20] if dice.random() < 0.6 else [0]  # else what another request with this prompt generates
            own = tuple(dice.randrange(1000, 9000) for _ in range(dice.choice(kinds)))
            own = own or (DUMMY_TOKEN,) * dice.choice([0, 3, 15])
            prompt = shared + own or (1,)
            self.requests.append(make_request("r", prompt, now, max_tokens=dice.randint(1, 60), ignore_eos=True))

    def serve(self, policy: Recorder, sample_s: float | None = None) -> Served:
        """Serve all requests; with ``sample_s``, steps are made ahead up to each multiple of it."""
        config = LoopConfig(
            max_model_len=4 * self.num_blocks, max_batched_tokens=32, max_num_seqs=self.max_num_seqs,
            block_bytes=BLOCK_BYTES,
        )  # fmt: skip
        link, timer = Link(Tier.HOST, 2e9), StepTimer(COST)
        slots = [SlotLedger(Tier.HOST, self.num_slots)] if self.num_slots else []
        ledger = BlockLedger(self.num_blocks, 4, caches_prefixes=self.caches)
        loop = Loop(LoopState(config, ledger, policy, BackupTable(slots, retains=self.caches), [link]), policy)
        environment = Environment()
        instance = VirtualInstance(
            environment,
            loop,
            timer.time_s,
            VirtualLinks({Tier.HOST: link}, BLOCK_BYTES),
            is_async=self.is_async,
            timer=None if sample_s is None else timer,
            until_s=lambda: (environment.now // (sample_s or 1.0) + 1) * (sample_s or 1.0),
        )
        served = Served(loop, instance)
        instance.on_step = served.note
        for request in self.requests:
            environment.schedule(
                request.arrival_s,
                lambda request=request: instance.arrive(request, lambda _: None),  # type: ignore[misc]
            )
        environment.run()
        loop.check_integrity()
        assert not loop.has_unfinished
        return served


@dataclass
class Served:
    """What a loop did: its steps with their times, and the tokens of its requests."""

    loop: Loop
    instance: VirtualInstance
    steps: list[tuple[object, ...]] = field(default_factory=list)
    tables: list[object] = field(default_factory=list)

    def note(self, plan: StepPlan, now: float) -> None:
        self.steps.append((now, replace(plan, tables=(), preemptions=(), released=())))
        self.tables.append((plan.tables, plan.preemptions, plan.released))

    @property
    def facts(self) -> tuple[object, ...]:
        """All that must be equal whether steps are made one by one or not."""
        state = self.loop.state
        lives = [
            (life.events, life.token_times_s, life.num_cached_tokens) for life in self.instance.lifecycles.values()
        ]
        cached = state.ledger.cached_blocks()
        return self.steps, lives, self.loop.counters, cached, state.prices.now, state.demand.now


CALM = Load(3, 90, 200, 8, caches=False, is_async=True)
LOADS = st.builds(
    Load,
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(25, 90),
    num_slots=st.sampled_from([0, 0, 20, 200]),
    max_num_seqs=st.integers(1, 8),
    caches=st.booleans(),
    is_async=st.booleans(),
)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=examples(40), deadline=None)
@given(load=LOADS, sample_s=st.sampled_from([0.3, 1.0, 100.0]))
def test_repeated_decisions_make_the_steps_of_asked_ones(name: str, load: Load, sample_s: float) -> None:
    asked, told = load.serve(Recorder(make_policy(name))), load.serve(Told(make_policy(name)))
    assert told.facts == asked.facts and told.tables == asked.tables
    assert load.serve(Told(make_policy(name)), sample_s).facts == asked.facts


@pytest.mark.parametrize("name", ["fcfs", "timely"])
def test_a_policy_is_seldom_asked_while_all_requests_decode(name: str) -> None:
    for sample_s in (None, 100.0):
        policy = Told(make_policy(name))
        assert len(policy.seen) * 3 < len(CALM.serve(policy, sample_s).steps)


@pytest.mark.parametrize("name", POLICIES)
def test_a_wrong_standing_is_seen(name: str) -> None:
    loads = [Load(seed, 30, 200, 8, caches=True, is_async=False) for seed in range(40)]
    assert any(
        load.serve(Rash(make_policy(name))).facts != load.serve(Recorder(make_policy(name))).facts for load in loads
    )


def wait_for_content(num_blocks: int, arrival_s: float) -> Load:
    """A request waits whose prompt is what another one generates."""
    load = Load(0, num_blocks, 0, 8, caches=True, is_async=False)
    load.requests = [
        make_request("r", (1, 2, 3, 4), 0.0, max_tokens=20, ignore_eos=True),
        make_request("r", (9, 9, 9, 9, 9, 9), 0.0, max_tokens=10, ignore_eos=True),
        make_request("r", (1, 2, 3, 4, *(DUMMY_TOKEN,) * 20), arrival_s, max_tokens=1, ignore_eos=True),
    ]
    return load


def test_a_waiting_prompt_that_others_generate_fits_no_sooner() -> None:
    loads = [wait_for_content(blocks, 0.01 * place) for blocks in (8, 9, 10) for place in range(1, 16)]
    asked = [load.serve(Recorder(make_policy("fcfs"))).facts for load in loads]
    for sample_s in (None, 100.0):
        assert [load.serve(Told(make_policy("fcfs")), sample_s).facts for load in loads] == asked
