"""How does the cost of a step under ``timely`` depend on how many requests wait? See README.md.

python benchmarks/scheduler/waiting.py
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from statistics import mean, median

from benchmarks.scheduler.bench_scheduler import BLOCK_TOKENS
from benchmarks.step_line import StepLine
from floodplain.core.backups import BackupTable
from floodplain.core.blocks import BlockLedger
from floodplain.core.plan import StepPlan, StepResult
from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.core.tiers import Link, SlotLedger, Tier
from floodplain.policy.registry import DEFAULT_POLICY, POLICIES, make_policy
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopConfig, LoopState

WAITING = (100, 1_000, 10_000)
NUM_PROMPT, MAX_TOKENS = 64, 256
LINE = StepLine(base_s=0.0300, decode_s=0.000304, prefill_token_s=0.0000909)
"""Of a step in the loop's time: Llama-2-70B on eight H100, as in benchmarks/policies."""
NUM_WARM = 400
"""Steps before the first that is measured: most of an answer."""


def make_loop(name: str, num_blocks: int) -> Loop:
    """A loop with ample swap space behind a quick link."""
    config = LoopConfig(
        max_model_len=1024, max_batched_tokens=8192, max_num_seqs=256, max_waiting=10**6, block_bytes=2**20,
        fingerprint="benchmark",
    )  # fmt: skip
    policy, backups = make_policy(name), BackupTable([SlotLedger(Tier.HOST, 8 * num_blocks)])
    ledger = BlockLedger(num_blocks, BLOCK_TOKENS, quantum_blocks=32)
    return Loop(LoopState(config, ledger, policy, backups, [Link(Tier.HOST, 50e9)]), policy)


def fill(loop: Loop, num_waiting: int, now: float) -> None:
    """Submit requests until as many wait; answers differ in length."""
    while len(loop.state.waiting) < num_waiting:
        number = loop.num_submitted
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS - 53 * number % 128, ignore_eos=True)
        prompt = tuple(number * 7919 + k for k in range(NUM_PROMPT + number % BLOCK_TOKENS))
        loop.submit(Request(request_id="r", prompt_token_ids=prompt, params=params, arrival_s=now))


def run_step(loop: Loop, now: float) -> tuple[float, float]:
    """(CPU microseconds of planning and completing a step, the time of its end); its copies end with it."""
    begin_ns = time.process_time_ns()
    plan = loop.next_plan(now)
    planned_ns = time.process_time_ns()
    assert isinstance(plan, StepPlan)
    result = StepResult(plan.step_id, [11] * len(plan.sampled))
    now += LINE.time_s(plan)
    resumed_ns = time.process_time_ns()
    loop.complete(result, now)
    for transfer in plan.transfers:
        loop.transfer_done(transfer.transfer_id, (), now)
    return (planned_ns - begin_ns + time.process_time_ns() - resumed_ns) / 1000, now


def measure(name: str, num_blocks: int, num_waiting: int, num_steps: int) -> tuple[float, float, float, float]:
    """(median CPU us of a step, mean, mean number of running streams, of swapped ones)."""
    loop, times, live, now = make_loop(name, num_blocks), list[float](), list[tuple[int, int]](), 0.0
    for step in range(NUM_WARM + num_steps):
        if step == NUM_WARM:
            gc.collect()
        fill(loop, num_waiting, now)
        used_us, now = run_step(loop, now)
        if step >= NUM_WARM:
            times.append(used_us)
            live.append((len(loop.state.running), len(loop.state.swapped)))
    running, swapped = zip(*live, strict=True)
    return median(times), mean(times), mean(running), mean(swapped)


def main() -> None:
    """Print a row for each number of waiting requests: medians over rounds, each in a new process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=POLICIES, default=DEFAULT_POLICY)
    parser.add_argument("--blocks", type=int, default=3_600, help="of the pool")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rounds: dict[int, list[tuple[float, ...]]] = {num_waiting: [] for num_waiting in WAITING}
    for _ in range(args.rounds):
        for num_waiting, found in rounds.items():
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as worker:
                found.append(worker.submit(measure, args.policy, args.blocks, num_waiting, args.steps).result())
    print("| waiting | running | swapped | median CPU us of a step | least and most round | mean CPU us |")
    print("|---|---|---|---|---|---|")
    for num_waiting, found in rounds.items():
        medians, means, running, swapped = zip(*found, strict=True)
        spread = f"{min(medians):.0f} to {max(medians):.0f}"
        counts = f"{mean(running):.0f} | {mean(swapped):.0f}"
        print(f"| {num_waiting:,} | {counts} | {median(medians):.0f} | {spread} | {median(means):.0f} |")


if __name__ == "__main__":
    main()
