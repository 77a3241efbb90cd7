"""The simulator decides as the engine: a run of a model on a CPU, replayed with its recorded times of steps and copies.

The engine's clock is moved by the measured seconds of each step and of each wait for copies, so that both sides have
exactly the same times. Every plan must be equal: its decodes, chunks, blocks, copies, and preemptions.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any, cast

import pytest

from floodplain.core.backups import BackupTable
from floodplain.core.blocks import BlockLedger
from floodplain.core.free_blocks import BlockId
from floodplain.core.plan import StepPlan, Transfer
from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.core.tiers import CopyTime, SlotLedger
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.shell import Engine
from floodplain.policy.registry import make_policy
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopState
from floodplain.sim.environment import Environment
from floodplain.sim.instance import VirtualInstance

NUM_BLOCKS, BLOCK_BYTES = 24, 16 * 512
SLOWNESS = 10.0
"""A step counts as so many times its duration: else recomputing is cheaper than a copy, on a fast machine."""
SWAP = {"swap": "host", "swap_memory": 2**20, "hardware": "emulated-pcie4"}


@dataclass
class Record:
    """What a run of the engine took: seconds by step, when each transfer ended, and the measured times of copies."""

    plans: list[StepPlan] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    ends_s: dict[int, float] = field(default_factory=dict)
    copy_times: list[Sequence[CopyTime]] = field(default_factory=list)


class Recorder:
    """The engine's executor and its clock, which moves while a step runs or copies are awaited."""

    def __init__(self, engine: Engine, record: Record) -> None:
        self.now, self._inner, self._swap, self._record = 0.0, engine.executor, engine._swap, record
        self._begun_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def clock(self) -> float:
        return self.now

    def submit(self, plan: StepPlan) -> None:
        self._record.plans.append(plan)
        self._begun_s = time.perf_counter()
        self._inner.submit(plan)

    def collect(self) -> Any:
        result = self._inner.collect()
        self._record.steps_s.append(SLOWNESS * (time.perf_counter() - self._begun_s))
        self.now += self._record.steps_s[-1]
        return result

    def poll(self) -> Any:
        return self._note(self._swap.poll())

    def wait(self, timeout_s: float) -> Any:
        begun_s = time.perf_counter()
        ended = self._swap.wait(timeout_s)
        self.now += time.perf_counter() - begun_s
        return self._note(ended)

    def take_copy_times(self) -> Any:
        self._record.copy_times.append(tuple(self._swap.take_copy_times()))
        return self._record.copy_times[-1]

    def _note(self, ended: Sequence[tuple[int, Sequence[int]]]) -> Any:
        self._record.ends_s |= {transfer_id: self.now for transfer_id, _ in ended}
        return ended


class RecordedLinks:
    """Copies that end when they did; in place of ``sim.instance.VirtualLinks``."""

    def __init__(self, record: Record) -> None:
        self._ends_s, self._times = record.ends_s, deque(record.copy_times)

    def start(self, transfer: Transfer, now: float) -> float:
        return self._ends_s[transfer.transfer_id]

    def take_copy_times(self, now: float) -> Sequence[CopyTime]:
        return self._times.popleft()


def make_requests(seed: int) -> list[Request]:
    """Requests that arrive faster than they are served; some prompts begin alike."""
    dice, now, requests = Random(seed), 0.0, []
    for number in range(24):
        now += dice.expovariate(4000.0)
        shared = (7,) * 32 if dice.random() < 0.3 else ()
        requests.append(
            Request(
                request_id=str(number),
                prompt_token_ids=(*shared, *(10 + number,) * dice.randint(8, 60)),
                params=SamplingParams(max_tokens=dice.randint(4, 60), ignore_eos=True, temperature=0.0),
                arrival_s=now,
            )
        )
    return requests


def run_engine(policy: str, seed: int, flags: dict[str, Any]) -> tuple[Record, Loop]:
    """Serve the requests on a model; an empty loop as the engine's is made of its facts before the first request."""
    record = Record()
    config = EngineConfig(
        model="dummy:tiny-llama", policy=policy, kv_memory=NUM_BLOCKS * BLOCK_BYTES, max_model_len=256, max_num_seqs=16,
        max_batched_tokens=64, **flags,
    )  # fmt: skip
    with closing(build_engine(config)) as engine:
        loop = _empty_copy(engine)
        recorder = Recorder(engine, record)
        engine._executor, engine._swap = recorder, cast(Any, recorder)
        engine.clock, engine.idle_memory = recorder.clock, None
        coming = deque(make_requests(seed))
        while coming or engine.has_unfinished:
            if not engine.has_unfinished:
                recorder.now = max(recorder.now, coming[0].arrival_s)
            while coming and coming[0].arrival_s <= recorder.now:
                engine.add(coming.popleft())
            engine.step()
    return record, loop


def _empty_copy(engine: Engine) -> Loop:
    state = engine.loop.state
    policy = make_policy(engine.config.policy, engine.config.sharing_settings())
    ledger = BlockLedger(
        state.ledger.num_blocks, state.ledger.block_tokens, quantum_blocks=state.ledger.quantum_blocks,
        caches_prefixes=state.ledger.caches_prefixes,
    )  # fmt: skip
    slots = [SlotLedger(tier, one.num_slots) for tier, one in state.backups.slots.items()]
    backups = BackupTable(slots, retains=ledger.caches_prefixes)
    links = list(state.links._first.values())
    return Loop(LoopState(state.config, ledger, policy, backups, links), policy, engine.config.seed)


def replay(record: Record, loop: Loop, seed: int) -> list[StepPlan]:
    """The plans of the simulator's instance for the same requests, with recorded times."""
    environment, durations, plans = Environment(), iter(record.steps_s), list[StepPlan]()
    links: Any = RecordedLinks(record)
    instance = VirtualInstance(environment, loop, lambda _: next(durations, 0.001), links)
    instance.on_step = lambda plan, _: plans.append(plan)
    for request in make_requests(seed):
        environment.schedule(request.arrival_s, partial(instance.arrive, request, lambda _: None))
    environment.run()
    return plans


def without_outputs(plans: Sequence[StepPlan]) -> Iterator[StepPlan]:
    """Plans whose chunks have no tokens but as many: the simulator samples one token for all."""
    for plan in plans:
        chunks = tuple(replace(chunk, token_ids=(0,) * len(chunk.token_ids)) for chunk in plan.prefills)
        yield replace(plan, prefills=chunks)


@pytest.mark.parametrize(
    ("policy", "flags"),
    [("fcfs", {"swap": "none"}), ("timely", SWAP), ("paced", SWAP), ("cfs", SWAP)],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_simulator_makes_the_plans_of_the_engine(policy: str, flags: dict[str, Any], seed: int) -> None:
    record, loop = run_engine(policy, seed, flags)
    plans = list(without_outputs(replay(record, loop, seed)))
    assert plans == list(without_outputs(record.plans))
    assert bool(record.ends_s) == (policy != "fcfs") or policy in ("timely", "paced")  # these go by measured times
    assert policy == "timely" or any(plan.preemptions for plan in plans)  # memory was short


def test_a_pool_of_one_block_less_is_noticed() -> None:
    """Control of the law above."""
    record, loop = run_engine("fcfs", 1, {"swap": "none"})
    loop.state.ledger.retire(BlockId(NUM_BLOCKS - 1))
    plans = list(without_outputs(replay(record, loop, 1)))
    assert plans != list(without_outputs(record.plans))
