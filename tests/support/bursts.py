"""Bursts: loops whose policies know the cost of links, and virtual instances that run them.

Token ids of different requests are distinct, so that no prefix is shared by accident; sharing is a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from benchmarks.step_line import StepLine
from floodplain.core.backups import BackupTable
from floodplain.core.blocks import BlockLedger
from floodplain.core.lifecycle import EventKind, Lifecycle
from floodplain.core.plan import Decision, StepPlan
from floodplain.core.request import OrderKey, Request, SeqId
from floodplain.core.sequence import Sequence as LoopSequence
from floodplain.core.tiers import Link, SlotLedger, Tier
from floodplain.core.view import View
from floodplain.policy.base import Policy
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import Counters, LoopConfig, LoopState
from floodplain.sim.environment import Environment
from floodplain.sim.instance import VirtualInstance
from floodplain.sim.links import VirtualLinks
from tests.support.loops import EOS, make_request

BLOCK_BYTES = 1024


LINE = StepLine(base_s=0.01, decode_s=0.0002, prefill_token_s=0.0003)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A small device with swap space. ``block_s`` is the time of one block on the link; 0: copies cost nothing."""

    num_blocks: int = 40
    block_tokens: int = 4
    num_slots: int = 400
    block_s: float = 0.0001
    latency_s: float = 0.0
    max_num_seqs: int = 64
    max_batched_tokens: int = 64
    max_model_len: int = 160
    depth: int = 1
    caches_prefixes: bool = True
    line: StepLine = LINE

    @property
    def link(self) -> Link:
        """The link to the host."""
        return Link(Tier.HOST, BLOCK_BYTES / self.block_s if self.block_s else 1e30, self.latency_s)

    def make_loop(self, policy: Policy, seed: int = 0) -> Loop:
        """Return an empty loop on this machine."""
        config = LoopConfig(
            max_model_len=self.max_model_len,
            max_batched_tokens=self.max_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            depth=self.depth,
            eos_token_ids=frozenset({EOS}),
            fingerprint="fake",
            block_bytes=BLOCK_BYTES,
        )
        ledger = BlockLedger(self.num_blocks, self.block_tokens, quantum_blocks=2, caches_prefixes=self.caches_prefixes)
        tiers = [SlotLedger(Tier.HOST, self.num_slots)] if self.num_slots else []
        backups = BackupTable(tiers, retains=self.caches_prefixes)
        return Loop(LoopState(config, ledger, policy, backups, [self.link]), policy, seed)


class Recorder:
    """Wraps a policy and records (view, now, decision) of each of its decisions."""

    def __init__(self, inner: Policy) -> None:
        self.name = inner.name
        self.waiting_window, self.num_newest = inner.waiting_window, inner.num_newest
        self.keeps_goals, self.chooses_admissions = inner.keeps_goals, inner.chooses_admissions
        self.inner = inner
        self.seen: list[tuple[View, float, Decision]] = []

    def waiting_key(self, seq: LoopSequence) -> OrderKey:
        return self.inner.waiting_key(seq)

    def decide(self, view: View, now: float, rng: Random) -> Decision:
        decision = self.inner.decide(view, now, rng)
        self.seen.append((view, now, decision))
        return decision


def make_burst(
    num_requests: int,
    *,
    interval_s: float = 0.0,
    num_prompt: int = 8,
    max_tokens: int = 20,
    num_shared: int = 0,
    clients: Sequence[str] = ("",),
    first_s: float = 0.0,
) -> list[Request]:
    """Return requests ``interval_s`` apart; the first ``num_shared`` prompt tokens are the same for all."""
    requests = []
    for index in range(num_requests):
        own = tuple(1000 + 1000 * index + position for position in range(num_prompt - num_shared))
        request = make_request(
            f"r{index}",
            tuple(range(num_shared)) + own,
            first_s + index * interval_s,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        requests.append(replace(request, client=clients[index % len(clients)]))
    return requests


@dataclass
class Run:
    """The result of a burst.

    Attributes:
        links: The links that copies really use; a test may change them during the run.
        steps: (begin time, plan) of every step.
    """

    instance: VirtualInstance
    environment: Environment
    links: dict[Tier, Link]
    steps: list[tuple[float, StepPlan]] = field(default_factory=list)

    @property
    def loop(self) -> Loop:
        """The loop."""
        return self.instance.loop

    @property
    def counters(self) -> Counters:
        """The loop's totals."""
        return self.instance.loop.counters

    @property
    def lifecycles(self) -> dict[SeqId, Lifecycle]:
        """Lifecycles of all requests, in order of submission."""
        return self.instance.lifecycles

    @property
    def elapsed_s(self) -> float:
        """Virtual time until everything is at rest."""
        return self.environment.now

    @property
    def max_ttft_s(self) -> float:
        """The longest wait for a first token."""
        return max(one.token_times_s[0] - one.arrival_s for one in self.lifecycles.values())

    @property
    def max_gap_s(self) -> float:
        """The longest gap between two tokens of one stream."""
        return max(max(one.itl_s, default=0.0) for one in self.lifecycles.values())


def entries(lifecycle: Lifecycle) -> list[float]:
    """Return the times at which a request entered the device: the beginnings of its turns."""
    return [when for when, kind in lifecycle.events if kind in (EventKind.SCHEDULED, EventKind.SWAPPED_IN)]


def exits(lifecycle: Lifecycle) -> list[float]:
    """Return the times at which a request was preempted."""
    return [when for when, kind in lifecycle.events if kind is EventKind.PREEMPTED]


def begin(
    machine: Machine,
    policy: Policy,
    requests: Iterable[Request],
    seed: int = 0,
    step_time_s: Callable[[StepPlan], float] | None = None,
) -> Run:
    """Return a run with all arrivals scheduled; steps take the time of the machine's line, or ``step_time_s``."""
    environment = Environment()
    links = {Tier.HOST: machine.link}
    times, lines = step_time_s or machine.line.time_s, VirtualLinks(links, BLOCK_BYTES)
    instance = VirtualInstance(environment, machine.make_loop(policy, seed), times, lines)
    run = Run(instance, environment, links)
    instance.on_step = lambda plan, now: run.steps.append((now, plan))
    for request in requests:
        environment.schedule(request.arrival_s, lambda request=request: instance.submit(request))  # type: ignore[misc]
    return run


def burst(machine: Machine, policy: Policy, requests: Iterable[Request], seed: int = 0) -> Run:
    """Run until all requests have arrived and ended, and everything is at rest."""
    run = begin(machine, policy, requests, seed)
    run.environment.run()
    assert not run.loop.has_unfinished
    run.loop.check_integrity()
    return run
