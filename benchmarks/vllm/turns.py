"""Later turns of sessions in vLLM, on a virtual clock: KV that is pinned for them, against LRU.

Run it in vLLM's environment: ``.venv-vllm/bin/python -m benchmarks.vllm.turns``. Deterministic.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.turns.loads import Rates, Session, Turn, make_sessions
from floodplain.observe.strict_json import save_result

HERE = Path(__file__).parent
MODES = ("stock", "off", "lru", "pins")
SCALE_NEW, SCALE_OUTPUT, MOST_TOKENS = 16, 4, 1900
"""The load of ``benchmarks/turns`` with this part of its tokens, and sessions of at most so many."""
RATES = Rates(agents=0.042, chats=0.14, singles=0.14, span_s=200.0)
"""As there, and so are the prices of steps, the KV cache and swap space: of Qwen3-32B on one RTX PRO 6000."""
RUN_S = 3600.0
"""Most seconds of a run: a killed process gives no result."""
HARDWARE, KV_TOKENS, MAX_BATCHED_TOKENS = "rtxpro6000", 6144, 128
BLOCK_BYTES = 8192


@dataclass
class Talk:
    """A session under way: what was said, and its turns that are left."""

    session: Session
    name: str
    dice: Random
    said: list[int] = field(default_factory=list)
    number: int = 0

    def next_prompt(self) -> list[int]:
        """Return the next turn's prompt: all that was said, and new tokens."""
        turn = self.session.turns[self.number]
        self.said += [self.dice.randrange(10, 40_000) for _ in range(turn.new_tokens)]
        return list(self.said)


def make_load(seed: int) -> list[Session]:
    """Return the sessions of a seed, by arrival; each ends before it is too long for the model."""
    sessions = []
    for one in make_sessions(RATES, seed):
        turns, total = list[Turn](), 0
        for turn in one.turns:
            small = Turn(max(4, turn.new_tokens // SCALE_NEW), max(4, turn.output_tokens // SCALE_OUTPUT), turn.gap_s)
            total += small.new_tokens + small.output_tokens
            if total > MOST_TOKENS:
                break
            turns.append(small)
        if turns:
            sessions.append(replace(one, turns=tuple(turns)))
    return sessions


def make_engine(mode: str, policy: str, swap_tokens: int) -> tuple[Any, Any, Any]:
    """Return an engine of a mode, its clock, and what its scheduler has done."""
    from benchmarks.turns.by_age import AgeOnly
    from benchmarks.vllm import measure
    from benchmarks.vllm.virtual import write_tiny_model

    more = {
        "enable_prefix_caching": True, "max_model_len": 2048, "enable_chunked_prefill": True,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS, "enforce_eager": True,
    }  # fmt: skip
    settings = {"swap_memory": swap_tokens // 32 * BLOCK_BYTES, "pin_sessions": mode in ("lru", "pins")}
    with TemporaryDirectory() as folder:
        model = str(write_tiny_model(Path(folder)))
        llm = measure.make_engine("stock" if mode == "stock" else policy, model, KV_TOKENS, "float32", more, **settings)
    clock = measure.make_clock(llm, HARDWARE)
    if mode == "lru":
        controller = measure.find_scheduler(llm)._controller
        controller.sessions.book = AgeOnly(controller.books.backups)
    measure.warm_up(llm)
    return llm, clock, measure.watch(llm)


def serve(llm: Any, clock: Any, sessions: Sequence[Session]) -> list[dict[str, Any]]:
    """Serve sessions to their ends, each turn some time after the one before; return a row for each request."""
    from vllm import SamplingParams

    begin_s, serials = clock.now(), count()
    talks = [Talk(one, f"session {number}", Random(number)) for number, one in enumerate(sessions)]
    due = [(talk.session.arrival_s, next(serials), talk) for talk in talks]
    live: dict[str, tuple[Talk, float, list[float]]] = {}
    rows: list[dict[str, Any]] = []
    heapq.heapify(due)
    while due or live:
        while due and begin_s + due[0][0] <= clock.now():
            due_s, serial, talk = heapq.heappop(due)
            turn = talk.session.turns[talk.number]
            params = SamplingParams(temperature=0.0, max_tokens=turn.output_tokens, ignore_eos=True)
            prompt: Any = {"prompt_token_ids": talk.next_prompt()}
            llm.llm_engine.add_request(str(serial), prompt, params, arrival_time=clock.wall_s(), session_id=talk.name)
            live[str(serial)] = (talk, due_s, [])
        clock.next_arrival_s = begin_s + due[0][0] if due else math.inf
        if not live:
            clock.sleep_until(clock.next_arrival_s)
            continue
        outputs = llm.llm_engine.step()
        now = clock.now() - begin_s
        for output in outputs:
            talk, due_s, times = live[output.request_id]
            tokens = output.outputs[0].token_ids
            times += [now] * (len(tokens) - len(times))
            if output.finished:
                del live[output.request_id]
                rows.append(_row_of(talk, due_s, times) | {"cached": output.num_cached_tokens})
                talk.said += tokens
                talk.number += 1
                if talk.number < len(talk.session.turns):
                    heapq.heappush(due, (now + talk.session.turns[talk.number].gap_s, next(serials), talk))
    return rows


def _row_of(talk: Talk, due_s: float, times: Sequence[float]) -> dict[str, Any]:
    gaps = [after - before for before, after in pairwise(times)]
    return {
        "kind": talk.session.kind, "is_later": talk.number > 0, "prompt": len(talk.said), "output": len(times),
        "ttft_s": times[0] - due_s, "e2e_s": times[-1] - due_s, "gap_s": max(gaps, default=0.0),
    }  # fmt: skip


def run_one(mode: str, policy: str, seed: int, swap_tokens: int) -> dict[str, Any]:
    """Serve the sessions of a seed in this process, which must not have made an engine before."""
    llm, clock, work = make_engine(mode, policy, swap_tokens)
    before_s, rows = clock.now(), serve(llm, clock, make_load(seed))
    return {
        "mode": mode, "policy": policy, "seed": seed, "swap_tokens": swap_tokens,
        "duration_s": clock.now() - before_s, "preemptions": work.num_preemptions, "rows": rows,
    }  # fmt: skip


def summarise(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pool the runs of one mode: times in seconds, and the cached part of the prompts of later turns."""
    rows = [row for run in runs for row in run["rows"]]
    later, others = [[row for row in rows if row["is_later"] is is_later] for is_later in (True, False)]
    return {
        "later_requests": len(later), "requests": len(rows),
        "later_cached": round(sum(row["cached"] for row in later) / sum(row["prompt"] for row in later), 4),
        "later_ttft": _times(later, "ttft_s"), "later_e2e": _times(later, "e2e_s"),
        "other_ttft": _times(others, "ttft_s"), "other_e2e": _times(others, "e2e_s"),
        "later_ttft_by_seed": [
            _times([row for row in run["rows"] if row["is_later"]], "ttft_s") for run in runs
        ],
        "longest_gap_s": round(max(row["gap_s"] for row in rows), 4),
        "preemptions": sum(run["preemptions"] for run in runs),
        "duration_s": round(sum(run["duration_s"] for run in runs), 2),
    }  # fmt: skip


def _times(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    seen = sorted(row[name] for row in rows)
    p90 = seen[min(len(seen) - 1, int(0.9 * len(seen)))]
    return {"p50_s": round(median(seen), 4), "p90_s": round(p90, 4), "mean_s": round(mean(seen), 4)}


def format_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a line for each mode; ratios are to ``lru`` of the same policy and swap space."""
    rows = list(rows)
    by_age = {(row["policy"], row["swap_tokens"]): row["later_ttft"] for row in rows if row["mode"] == "lru"}
    lines = [
        "| policy | swap space | mode | later turns: cached | TTFT p50 | p90 | mean | of lru's p50, mean |"
        " others: TTFT p50 | mean | E2E p50 | mean | longest gap | preemptions |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        later, base = row["later_ttft"], by_age.get((row["policy"], row["swap_tokens"]))
        ratios = f"{later['p50_s'] / base['p50_s']:.2f}, {later['mean_s'] / base['mean_s']:.2f}" if base else ""
        others = [row[name][key] for name in ("other_ttft", "other_e2e") for key in ("p50_s", "mean_s")]
        cells = [
            row["policy"], str(row["swap_tokens"] or ""), row["mode"], f"{100 * row['later_cached']:.0f} %",
            *(f"{seconds:.3g} s" for seconds in later.values()), ratios, *(f"{seconds:.3g} s" for seconds in others),
            f"{row['longest_gap_s']:.2g} s", str(row["preemptions"]),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def make_jobs(args: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Return (mode, policy, tokens of swap space) of each row.

    Stock vLLM has one policy and no swap space. ``off`` under ``fcfs`` is left out: it swaps nothing out, as stock.
    """
    jobs = [
        ("stock", "fcfs", 0) if mode == "stock" else (mode, policy, swap_tokens)
        for policy in args.policies for swap_tokens in args.swap_tokens for mode in args.modes
        if (mode, policy) != ("off", "fcfs")
    ]  # fmt: skip
    return list(dict.fromkeys(jobs))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", nargs="+", default=["fcfs", "timely"])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--swap-tokens", type=int, nargs="+", default=[7680, 11520], help="room; the KV cache has 6144")
    parser.add_argument("--at-once", type=int, help="processes; default: as many as cores")
    parser.add_argument("--out", type=Path, default=HERE / "turns.json")
    args = parser.parse_args()

    from benchmarks.vllm import measure  # noqa: F401  vLLM: once, before the processes fork

    rows = []
    with get_context("fork").Pool(args.at_once, maxtasksperchild=1) as processes:
        jobs = make_jobs(args)
        runs = [
            [processes.apply_async(run_one, (mode, policy, seed, swap_tokens)) for seed in args.seeds]
            for mode, policy, swap_tokens in jobs
        ]
        for (mode, policy, swap_tokens), seeds in zip(jobs, runs, strict=True):
            pooled = summarise([run.get(RUN_S) for run in seeds])
            rows.append({"policy": policy, "swap_tokens": swap_tokens, "mode": mode} | pooled)
    print(format_table(rows))
    settings = {"seeds": args.seeds, "kv_tokens": KV_TOKENS, "hardware": HARDWARE}
    save_result(args.out, {"settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
