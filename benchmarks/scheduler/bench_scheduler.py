"""How long does the loop itself think about one step? See README.md."""

from __future__ import annotations

import argparse
import gc
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import linear_regression, mean, median, quantiles

from floodplain.core.backups import BackupTable
from floodplain.core.blocks import BlockLedger
from floodplain.core.plan import StepPlan, StepResult
from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.core.tiers import Link, SlotLedger, Tier
from floodplain.observe.strict_json import save_result
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.registry import make_policy
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopConfig, LoopState

BLOCK_TOKENS = 16
RUNNING = (1, 8, 32, 128, 256)
WAITING = (10, 1_000, 100_000)
STEP_S = 0.03
"""Of the device, in the loop's time: policies that take turns read how long a stream has been silent."""
NUM_LARGE_BLOCKS, LARGE_TARGET_S = 5_000_000, 0.2
"""Of a small model's pool in a machine's memory; an engine, and each forming of a pipeline, makes its ledger anew."""
TARGET_BASE_US, TARGET_PER_SEQUENCE_US = 50.0, 1.5


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of ``next_plan`` plus ``complete`` over all steps of one set-up, and what happened meanwhile."""

    scenario: str
    num_running: int
    num_waiting: int
    num_swapped: int
    num_steps: int
    median_us: float
    mean_us: float
    p99_us: float
    medians_of_repeats_us: list[float]
    num_preemptions: int
    num_finished: int


def make_loop(num_running: int, num_blocks: int, max_model_len: int = 16_384) -> Loop:
    """FCFS at depth 1 with room for ``num_running`` sequences and for any number of waiting ones."""
    config = LoopConfig(
        max_model_len=max_model_len,
        max_batched_tokens=8192,
        max_num_seqs=num_running,
        max_waiting=10**6,
        fingerprint="benchmark",
    )
    policy = FcfsPolicy()
    return Loop(LoopState(config, BlockLedger(num_blocks, BLOCK_TOKENS, quantum_blocks=32), policy), policy)


def submit(loop: Loop, number: int, num_prompt: int, max_tokens: int, num_shared: int = 0) -> None:
    """One request; its first ``num_shared`` tokens are those of all others."""
    prompt = (*range(num_shared), *(number * 7919 + k for k in range(num_shared, num_prompt)))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    loop.submit(Request(request_id="r", prompt_token_ids=prompt, params=params, arrival_s=float(number)))


def run_steps(loop: Loop, num_steps: int) -> list[float]:
    """Microseconds of each step. Making the tokens is the executor's work and is not counted."""
    times = []
    clock = time.perf_counter_ns
    for _ in range(num_steps):
        now = loop.counters.num_steps * STEP_S
        start = clock()
        plan = loop.next_plan(now)
        planned = clock()
        assert isinstance(plan, StepPlan)
        result = StepResult(plan.step_id, [11] * len(plan.sampled))
        resumed = clock()
        loop.complete(result, now + STEP_S)
        for transfer in plan.transfers:
            loop.transfer_done(transfer.transfer_id, (), now + STEP_S)
        times.append((planned - start + clock() - resumed) / 1000)
    return times


def measure(scenario: str, loop: Loop, num_running: int, num_steps: int, num_repeats: int) -> Timing:
    """Time a loop that was warmed up."""
    counters = loop.counters
    num_preempted, num_finished = counters.preemptions["recompute"], counters.finished["length"]
    gc.collect()
    repeats = [run_steps(loop, num_steps) for _ in range(num_repeats)]
    times = [step for repeat in repeats for step in repeat]
    return Timing(
        scenario=scenario,
        num_running=num_running,
        num_waiting=len(loop.state.waiting),
        num_swapped=len(loop.state.swapped),
        num_steps=len(times),
        median_us=round(median(times), 1),
        mean_us=round(mean(times), 1),
        p99_us=round(quantiles(times, n=100)[98], 1),
        medians_of_repeats_us=[round(median(repeat), 1) for repeat in repeats],
        num_preemptions=counters.preemptions["recompute"] - num_preempted,
        num_finished=counters.finished["length"] - num_finished,
    )


def steady(num_running: int, num_waiting: int, num_steps: int, num_repeats: int) -> Timing:
    """All requests decode; none arrives or ends. Prompts differ in length, so block boundaries are spread."""
    max_tokens = num_steps * num_repeats + 200
    blocks_each = (96 + max_tokens) // BLOCK_TOKENS + 1
    loop = make_loop(num_running, num_running * blocks_each)
    for number in range(num_running):
        submit(loop, number, 64 + number % BLOCK_TOKENS, max_tokens)
    run_steps(loop, 100)
    for number in range(num_running, num_running + num_waiting):
        submit(loop, number, 64, 64)
    return measure("steady", loop, num_running, num_steps, num_repeats)


def under_pressure(num_running: int, num_steps: int, num_repeats: int) -> Timing:
    """Requests come and go, and the pool holds 60 % of what they grow to: admissions, preemptions, evictions."""
    loop = make_loop(num_running, max(48, int(num_running * 0.6 * (256 + 256) / BLOCK_TOKENS)))
    num_requests = num_running + num_running * (num_steps * num_repeats + 500) // 128
    for number in range(num_requests):
        submit(loop, number, 128 + (number * 37) % 256, 128 + (number * 53) % 256)
    run_steps(loop, 500)
    return measure("under pressure", loop, num_running, num_steps, num_repeats)


def long_prefixes(num_running: int, num_steps: int, num_repeats: int) -> Timing:
    """All requests, waiting ones too, share a prefix of 8,192 tokens: 512 blocks to find for each of those in sight."""
    max_tokens = num_steps * num_repeats + 200
    blocks_each = (96 + max_tokens) // BLOCK_TOKENS + 1
    loop = make_loop(num_running, 1024 + num_running * blocks_each)
    for number in range(num_running):
        submit(loop, number, 8192 + 1 + number % BLOCK_TOKENS, max_tokens, num_shared=8192)
        run_steps(loop, 2)
    for number in range(num_running, num_running + 1000):
        submit(loop, number, 8192 + 64, 64, num_shared=8192)
    run_steps(loop, 100)
    return measure("long shared prefixes", loop, num_running, num_steps, num_repeats)


def taking_turns(name: str, num_live: int, num_steps: int, num_repeats: int) -> Timing:
    """Memory for a third of those alive, steps of 30 ms: the others are in swap space. Copies end within a step."""
    max_tokens = num_steps * num_repeats + 200
    blocks_each = (96 + max_tokens) // BLOCK_TOKENS + 1
    num_blocks = num_live * blocks_each // 3
    config = LoopConfig(
        max_model_len=16_384, max_batched_tokens=8192, max_num_seqs=256, max_waiting=10**6, block_bytes=2**20,
        fingerprint="benchmark",
    )  # fmt: skip
    policy, backups = make_policy(name), BackupTable([SlotLedger(Tier.HOST, num_live * blocks_each)])
    ledger = BlockLedger(num_blocks, BLOCK_TOKENS, quantum_blocks=32)
    loop = Loop(LoopState(config, ledger, policy, backups, [Link(Tier.HOST, 50e9)]), policy)
    for number in range(num_live):
        submit(loop, number, 64 + number % BLOCK_TOKENS, max_tokens)
    run_steps(loop, 500)
    return measure(f"taking turns: {name}", loop, len(loop.state.running), num_steps, num_repeats)


def open_large_pool(quantum_blocks: int) -> float:
    """CPU seconds until a ledger of five million free blocks, and one of as many slots, are there and were counted."""
    gc.collect()
    start = time.process_time()
    ledger = BlockLedger(NUM_LARGE_BLOCKS, BLOCK_TOKENS, quantum_blocks=quantum_blocks)
    SlotLedger(Tier.HOST, NUM_LARGE_BLOCKS)
    ledger.count_states()
    return time.process_time() - start


def fit(timings: list[Timing]) -> tuple[float, float]:
    """Least squares of median = base + slope * running."""
    slope, base = linear_regression([t.num_running for t in timings], [t.median_us for t in timings])
    return base, slope


def all_timings(num_steps: int, num_repeats: int) -> Iterator[Timing]:
    """Every set-up, one after the other."""
    for num_waiting in WAITING:
        for num_running in RUNNING:
            yield steady(num_running, num_waiting, num_steps, num_repeats)
    for num_running in RUNNING:
        yield under_pressure(num_running, num_steps, num_repeats)
    yield long_prefixes(32, num_steps // 4, num_repeats)
    for name in ("timely", "paced", "fair", "cfs"):
        for num_live in (60, 300, 900):
            yield taking_turns(name, num_live, num_steps // 4, num_repeats)


def processor() -> str:
    """The processor's name as the system tells it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    """Print the table and write ``result.json`` beside this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="steps of each repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    arguments = parser.parse_args()
    timings = []
    columns = "".join(f"{name:>9}" for name in ("running", "waiting", "swapped", "median", "mean", "p99", "target"))
    print(f"{'scenario':21}{columns}  us per step")
    for timing in all_timings(arguments.steps, arguments.repeats):
        timings.append(timing)
        target = TARGET_BASE_US + TARGET_PER_SEQUENCE_US * timing.num_running
        numbers = f"{timing.median_us:9.1f}{timing.mean_us:9.1f}{timing.p99_us:9.1f}{target:9.1f}"
        print(
            f"{timing.scenario:21}{timing.num_running:9}{timing.num_waiting:9}{timing.num_swapped:9}{numbers}",
            flush=True,
        )
    fits = {}
    for num_waiting in WAITING:
        base, slope = fit([t for t in timings if t.scenario == "steady" and t.num_waiting == num_waiting])
        fits[num_waiting] = {"base_us": round(base, 1), "per_sequence_us": round(slope, 3)}
        print(f"steady, {num_waiting} waiting: {base:.1f} us + {slope:.3f} us per running sequence")
    pools = {quantum: min(open_large_pool(quantum) for _ in range(3)) for quantum in (1, 32)}
    for quantum, seconds in pools.items():
        print(f"pool of {NUM_LARGE_BLOCKS:,} blocks, {quantum} a quantum: {seconds:.3f} s (target {LARGE_TARGET_S} s)")
    result = {
        "command": " ".join(["python", "benchmarks/scheduler/bench_scheduler.py", *sys.argv[1:]]),
        "machine": {"processor": processor(), "system": platform.system(), "python": platform.python_version()},
        "target": {"base_us": TARGET_BASE_US, "per_sequence_us": TARGET_PER_SEQUENCE_US},
        "fits": fits,
        "large_pool_s": pools,
        "timings": [asdict(timing) for timing in timings],
    }
    save_result(arguments.out, result)


if __name__ == "__main__":
    main()
