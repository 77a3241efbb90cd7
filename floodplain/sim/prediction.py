"""Serves a scenario's requests in virtual time, and returns the benchmark result that a real run would have."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from floodplain.core.errors import RequestRefused, UserError
from floodplain.core.lifecycle import Lifecycle
from floodplain.core.plan import StepPlan, TransferKind
from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.core.tiers import Link, Tier
from floodplain.cost.devices import Roofline, predict_blocks
from floodplain.cost.fits import fit_of
from floodplain.cost.step_time import BatchCost, StepTimer
from floodplain.observe.plots import residence_columns
from floodplain.observe.result import EngineReport, HardwareReport, RunInfo, SwapReport, benchmark_result
from floodplain.observe.timeline import Timeline, TimelineSample
from floodplain.policy.registry import make_policy
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopConfig
from floodplain.sim.cost_files import read_kernels, read_steps
from floodplain.sim.instance import Environment, VirtualInstance, VirtualLinks
from floodplain.sim.scenario import Scenario
from floodplain.sim.serving import VirtualDevice
from floodplain.workload.goals import goals_from
from floodplain.workload.records import RequestRecord
from floodplain.workload.spec import build_rows, prefix_block_tokens
from floodplain.workload.traces import TraceRow

SAMPLE_S = 1.0
NUM_LONE = 8
"""Requests that are simulated alone, to know the goals: five times their median TTFT and TPOT."""
_DTYPE_BYTES = 2
_OWN_TOKENS = 2**31
"""Token ids from here on are of one request only."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a scenario says of the device, resolved. ``cost_source`` says in a line where step times come from."""

    num_blocks: int
    block_bytes: int
    max_model_len: int
    cost: BatchCost
    cost_source: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """A simulated run: lifecycles in order of arrival, and the result of ``observe.result.benchmark_result``."""

    machine: Machine
    lifecycles: list[Lifecycle]
    result: dict[str, object]


def predict(scenario: Scenario, rows: Sequence[TraceRow] | None = None) -> Prediction:
    """Serve the workload of a scenario, or ``rows``. UserError if a file cannot be read, or nothing fits."""
    machine = resolve_machine(scenario)
    requests = make_requests(build_rows(scenario.workload) if rows is None else rows, scenario)
    if not requests:
        raise UserError("workload: there is no request")
    goals = scenario.workload.goodput or goals_from(_serve_alone(scenario, machine, requests))
    run = _Run(scenario, machine)
    records = run.serve(requests)
    info = RunInfo(
        backend="simulator",
        model_id=scenario.shape.name,
        tokenizer_id="",
        request_rate=None if scenario.workload.trace or rows is not None else scenario.workload.request_rate,
        burstiness=scenario.workload.burstiness,
        seed=scenario.workload.seed,
        config=dict(scenario.written),
        goodput=goals,
        hardware=HardwareReport(name=f"simulated {scenario.num_shards} x {scenario.device.name}", emulated=True),
    )
    result = benchmark_result(records, info, run.report(), run.timeline.columns())
    result["floodplain"] |= {
        "residence": residence_columns(run.finished()),
        "simulation": run.facts() | {"kv_blocks": machine.num_blocks, "step_cost": machine.cost_source},
    }
    return Prediction(machine, list(run.instance.lifecycles.values()), result)


def resolve_machine(scenario: Scenario) -> Machine:
    """The KV pool, the longest request, and the cost of steps."""
    engine, shape = scenario.engine, scenario.shape
    num_blocks = engine.kv_blocks or predict_blocks(
        shape,
        scenario.device,
        utilisation=engine.utilisation,
        max_num_seqs=engine.max_num_seqs,
        max_batched_tokens=engine.max_batched_tokens,
        block_tokens=engine.block_tokens,
        num_shards=scenario.num_shards,
        dtype_bytes=_DTYPE_BYTES,
    )
    block_bytes = engine.block_tokens * shape.kv_bytes_per_token(_DTYPE_BYTES) // scenario.num_shards
    longest = min(engine.max_model_len or shape.max_position, num_blocks * engine.block_tokens)
    return Machine(num_blocks, block_bytes, longest, *_find_cost(scenario))


def _find_cost(scenario: Scenario) -> tuple[BatchCost, str]:
    part, shape, device = scenario.cost, scenario.shape, scenario.device
    overhead_s = device.overhead_s if part.overhead_ms is None else part.overhead_ms / 1e3
    if part.kernels is not None:
        kernels = read_kernels(part.kernels, shape.num_layers, overhead_s, scenario.engine.max_num_seqs)
        return kernels, f"kernels in {part.kernels}"
    if part.steps is not None:
        return read_steps(part.steps, (part.overhead_ms or 0.0) / 1e3), f"step profile {part.steps}"
    if (fit := fit_of(device.name, shape.name, scenario.num_shards)) is not None:
        return fit.with_overhead(overhead_s), f"{fit.source}; median error of a step {fit.median_error:.1%}"
    roofline = Roofline(shape, device, scenario.num_shards, _DTYPE_BYTES, overhead_s)
    return roofline, f"roofline, up to 20 % off where it was checked ({device.source})"


def make_requests(rows: Sequence[TraceRow], scenario: Scenario) -> list[Request]:
    """Requests with made-up tokens: equal ones only where ``prefix_ids`` say so. Outputs have the rows' lengths."""
    block_tokens = prefix_block_tokens(scenario.workload)
    return [
        Request(
            request_id=str(number),
            prompt_token_ids=_tokens(row, block_tokens, number),
            params=SamplingParams(max_tokens=row.output_tokens, ignore_eos=True, temperature=0.0),
            arrival_s=row.arrival_s,
        )
        for number, row in enumerate(rows)
    ]


def _tokens(row: TraceRow, block_tokens: int, number: int) -> tuple[int, ...]:
    """One token for each shared prefix, repeated, and one for the rest: block keys depend on all tokens before."""
    shared = row.prefix_ids[: row.prompt_tokens // block_tokens]
    own = row.prompt_tokens - len(shared) * block_tokens
    return sum(((prefix % _OWN_TOKENS,) * block_tokens for prefix in shared), ()) + (_OWN_TOKENS + number,) * own


def _serve_alone(scenario: Scenario, machine: Machine, requests: Sequence[Request]) -> list[RequestRecord]:
    chosen = [requests[place * len(requests) // NUM_LONE] for place in range(min(NUM_LONE, len(requests)))]
    return [record for request in chosen for record in _Run(scenario, machine).serve([request])]


class _Run:
    def __init__(self, scenario: Scenario, machine: Machine) -> None:
        engine, link = scenario.engine, scenario.link
        self.environment, self.timeline = Environment(), Timeline()
        self._machine, self._events = machine, blake2b(digest_size=16)
        bandwidth = min(link.inbound.peak_bandwidth, link.outbound.peak_bandwidth) if link else 1.0
        latency_s = max(link.inbound.latency_s, link.outbound.latency_s) if link else 0.0
        device = VirtualDevice(
            step_time_s=StepTimer(machine.cost).time_s,
            num_blocks=machine.num_blocks,
            block_tokens=engine.block_tokens,
            config=LoopConfig(
                max_model_len=machine.max_model_len,
                max_batched_tokens=engine.max_batched_tokens,
                max_num_seqs=engine.max_num_seqs,
                max_waiting=2**31,
                block_bytes=machine.block_bytes,
            ),
            link=Link(Tier.HOST, bandwidth, latency_s),
            num_swap_slots=scenario.swap.memory // scenario.num_shards // machine.block_bytes if scenario.swap else 0,
            caches_prefixes=engine.prefix_cache,
        )
        self._links = VirtualLinks({Tier.HOST: device.link}, machine.block_bytes)
        self.loop: Loop = device.make_loop(make_policy(engine.policy, engine.settings), scenario.workload.seed)
        self.instance = VirtualInstance(self.environment, self.loop, device.step_time_s, self._links)
        self._is_async = engine.scheduling == "async"
        self.instance.on_step = self._note
        self._refused: dict[str, str] = {}
        self._decodes: tuple[int, ...] | None = None
        self._num_steps, self._next_sample_s, self._cpu_s = 0, 0.0, 0.0

    def serve(self, requests: Sequence[Request]) -> list[RequestRecord]:
        """Serve the requests to their ends; the records are in their order."""
        for request in requests:
            self.environment.schedule(request.arrival_s, partial(self._submit, request))
        start_s = time.process_time()
        self.environment.run()
        self._cpu_s = time.process_time() - start_s
        lives = iter(sorted(self.instance.lifecycles.items()))
        return [self._record(request, lives) for request in sorted(requests, key=lambda each: each.arrival_s)]

    def _submit(self, request: Request) -> None:
        try:
            self.loop.check(request)
        except RequestRefused as error:
            self._refused[request.request_id] = str(error)
        else:
            submit = self.instance.submit_async if self._is_async else self.instance.submit
            submit(request)

    def _record(self, request: Request, lives: Iterator[tuple[int, Lifecycle]]) -> RequestRecord:
        error = self._refused.get(request.request_id)
        times = () if error else tuple(next(lives)[1].token_times_s)
        return RequestRecord(
            request_id=request.request_id,
            prompt_tokens=len(request.prompt_token_ids),
            arrival_s=request.arrival_s,
            sent_s=request.arrival_s,
            finished_s=times[-1] if times else request.arrival_s,
            token_times_s=times,
            output_token_ids=None,
            text="",
            error=error,
        )

    def _note(self, plan: StepPlan, now: float) -> None:
        self._num_steps += 1
        chunks = [(chunk.seq_id, chunk.start, len(chunk.token_ids)) for chunk in plan.prefills]
        moves = [(transfer.kind.value, len(transfer.blocks)) for transfer in plan.transfers]
        decodes = None if plan.decodes is self._decodes else plan.decodes
        self._decodes = plan.decodes
        self._events.update(repr((now, decodes, chunks, moves)).encode())
        if now >= self._next_sample_s:
            self._next_sample_s = now + SAMPLE_S
            self.timeline.record(self._sample(now))

    def _sample(self, now: float) -> TimelineSample:
        state = self.loop.state
        ledger, swapped = state.ledger, len(state.swapped) + len(state.loading)
        used = ledger.num_blocks - ledger.num_available
        return TimelineSample(now, len(state.running), len(state.waiting), swapped, used, ledger.num_blocks)

    def finished(self) -> list[Lifecycle]:
        """The lifecycles of all requests that were served."""
        return list(self.instance.lifecycles.values())

    def report(self) -> EngineReport:
        """The counts of the engine."""
        counters, moved = self.loop.counters, self._links.moved_bytes
        return EngineReport(
            preemptions=sum(counters.preemptions.values()),
            recomputed_tokens=counters.num_recomputed_tokens,
            wasted_tokens=counters.num_wasted_tokens,
            steps=self._num_steps,
            scheduler_s=self._cpu_s,
            swap=SwapReport(
                out_bytes=moved[TransferKind.SWAP_OUT],
                in_bytes=moved[TransferKind.SWAP_IN],
                backup_bytes=sum(moved.values()) - moved[TransferKind.SWAP_OUT] - moved[TransferKind.SWAP_IN],
                stall_s=self.instance.stall_s,
            ),
        )

    def facts(self) -> dict[str, object]:
        """The speed of the simulation, and the digest of its events: equal for equal scenarios."""
        return {"events": self._events.hexdigest(), "cpu_s": self._cpu_s, "virtual_s": self.environment.now}
