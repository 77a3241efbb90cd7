"""What pinned sessions gain for later turns, and what others lose, in virtual time; see README.md. Deterministic."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.turns.by_age import AgeOnly
from benchmarks.turns.loads import Rates, Replay, Session, make_sessions, read_sessions
from floodplain.core.backups import BackupTable
from floodplain.core.blocks import BlockLedger
from floodplain.core.lifecycle import EventKind, Lifecycle
from floodplain.core.request import Request, SeqId
from floodplain.core.sampling import SamplingParams
from floodplain.core.tiers import Link, SlotLedger, Tier
from floodplain.cost.devices import DEVICES, predict_blocks
from floodplain.cost.fits import fit_of
from floodplain.cost.model_shape import SHAPES
from floodplain.cost.step_time import StepTimer
from floodplain.observe.strict_json import save_result
from floodplain.policy.registry import make_policy
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopConfig, LoopState
from floodplain.sim.environment import Environment
from floodplain.sim.instance import VirtualInstance
from floodplain.sim.links import VirtualLinks
from floodplain.sim.virtual_engine import DUMMY_TOKEN

HERE = Path(__file__).resolve().parent
DEVICE, MODEL = "rtxpro6000", "qwen3-32b"
BLOCK_TOKENS, MAX_NUM_SEQS, MAX_BATCHED_TOKENS = 64, 128, 2048
LINK = Link(Tier.HOST, 50e9, 1e-5)
"""PCIe 5."""
MODES = ("off", "lru", "pins")
RATES = Rates(agents=0.042, chats=0.14, singles=0.14, span_s=200.0)


class Server:
    """One engine in virtual time, and a row for each request that it has answered."""

    def __init__(self, mode: str, policy_name: str, swap_bytes: float) -> None:
        shape, fit = SHAPES[MODEL], fit_of(DEVICE, MODEL, 1)
        assert fit is not None
        num_blocks = predict_blocks(
            shape,
            DEVICES[DEVICE],
            utilisation=0.9,
            max_num_seqs=MAX_NUM_SEQS,
            max_batched_tokens=MAX_BATCHED_TOKENS,
            block_tokens=BLOCK_TOKENS,
        )
        block_bytes = BLOCK_TOKENS * shape.kv_bytes_per_token(2)
        config = LoopConfig(
            max_model_len=shape.max_position,
            max_batched_tokens=MAX_BATCHED_TOKENS,
            max_num_seqs=MAX_NUM_SEQS,
            max_waiting=1_000_000,
            block_bytes=block_bytes,
            pins_sessions=mode != "off",
        )
        policy = make_policy(policy_name)
        backups = BackupTable([SlotLedger(Tier.HOST, int(swap_bytes // block_bytes))])
        self.state = LoopState(config, BlockLedger(num_blocks, BLOCK_TOKENS), policy, backups, [LINK])
        if mode == "lru":
            self.state.sessions = AgeOnly(backups)
        self.environment = Environment()
        self.instance = VirtualInstance(
            self.environment,
            Loop(self.state, policy, 0),
            StepTimer(fit.with_overhead(DEVICES[DEVICE].overhead_s)).time_s,
            VirtualLinks({Tier.HOST: LINK}, block_bytes),
        )
        self.instance.on_boundary = self._note_ends
        self.rows: list[dict[str, Any]] = []
        self._live: dict[SeqId, tuple[str, bool, Callable[[], None]]] = {}
        self._prompts: dict[SeqId, int] = {}
        self._num_asked = 0

    def ask(
        self, kind: str, is_later: bool, prompt: tuple[int, ...], num_output: int, name: str, then: Callable[[], None]
    ) -> None:
        """Send a request now; ``then`` is called when it has ended."""
        self._num_asked += 1
        request = Request(
            request_id=str(self._num_asked),
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=num_output, ignore_eos=True, temperature=0.0),
            arrival_s=self.environment.now,
            session=name,
        )
        seq_id = self.instance.submit(request)
        self._live[seq_id], self._prompts[seq_id] = (kind, is_later, then), len(prompt)

    def run(self) -> dict[str, Any]:
        """Serve to the end; returns the rows, and totals."""
        self.environment.run()
        self.instance.loop.check_integrity()
        sessions = self.state.sessions
        return {
            "rows": self.rows,
            "duration_s": self.environment.now,
            "busy_s": self.instance.busy_s,
            "preemptions": self.state.counters.preemptions,
            "returns": None if sessions is None else [sessions.counts.hits, sessions.counts.misses],
        }

    def _note_ends(self) -> None:
        for seq_id in [one for one in self._live if self._life(one).events[-1][1] is EventKind.FINISHED]:
            kind, is_later, then = self._live.pop(seq_id)
            life = self._life(seq_id)
            self.rows.append(
                {
                    "kind": kind,
                    "is_later": is_later,
                    "ttft_s": life.ttft_s,
                    "tpot_s": life.tpot_s or 0.0,
                    "e2e_s": life.e2e_s,
                    "gap_s": max(life.itl_s, default=0.0),
                    "prompt": self._prompts.pop(seq_id),
                    "cached": life.num_cached_tokens,
                }
            )
            then()

    def _life(self, seq_id: SeqId) -> Lifecycle:
        return self.instance.lifecycles[seq_id]


class Talk:
    """A session that sends its turns: each prompt begins with all that was said before."""

    def __init__(self, server: Server, session: Session, number: int, is_named: bool) -> None:
        self._server, self._session = server, session
        self._name = f"{session.kind} {number}" if is_named else ""
        self._said: tuple[int, ...] = ()
        self._next_token = 1 + number * 1_000_000
        self._index = 0
        server.environment.schedule(session.arrival_s, self._ask)

    def _ask(self) -> None:
        turn = self._session.turns[self._index]
        self._said += tuple(range(self._next_token, self._next_token + turn.new_tokens))
        self._next_token += turn.new_tokens
        kind, is_later = self._session.kind, self._index > 0
        self._server.ask(kind, is_later, self._said, turn.output_tokens, self._name, self._go_on)

    def _go_on(self) -> None:
        turns = self._session.turns
        self._said += (DUMMY_TOKEN,) * turns[self._index].output_tokens
        self._index += 1
        if self._index < len(turns):
            now = self._server.environment.now
            self._server.environment.schedule(now + turns[self._index].gap_s, self._ask)


def serve_sessions(
    mode: str, policy: str, swap_bytes: float, rates: Rates, seed: int, is_named: bool
) -> dict[str, Any]:
    """Serve the sessions of a seed to their ends."""
    server = Server(mode, policy, swap_bytes)
    for number, session in enumerate(make_sessions(rates, seed)):
        Talk(server, session, number, is_named)
    return server.run()


def serve_trace(mode: str, policy: str, swap_bytes: float, replays: Sequence[Replay]) -> dict[str, Any]:
    """Serve recorded requests at their recorded times; sessions have no names."""
    server = Server(mode, policy, swap_bytes)
    for one in replays:
        ask = partial(server.ask, "chat", one.continues is not None, one.prompt, one.output_tokens, "", lambda: None)
        server.environment.schedule(one.arrival_s, ask)
    return server.run()


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one mode, pooled over its runs: for each kind of request, latencies in seconds."""
    rows = [row for run in runs for row in run["rows"]]
    groups = {
        "later turns": [row for row in rows if row["is_later"]],
        "later turns of agents": [row for row in rows if row["is_later"] and row["kind"] == "agent"],
        "later turns of chats": [row for row in rows if row["is_later"] and row["kind"] == "chat"],
        "others": [row for row in rows if not row["is_later"]],
    }
    total: Counter[str] = Counter()
    for run in runs:
        total.update(run["preemptions"])
    return {
        "groups": {name: _figures(group) for name, group in groups.items() if group},
        "busy_s": round(sum(run["busy_s"] for run in runs), 1),
        "duration_s": round(sum(run["duration_s"] for run in runs), 1),
        "preemptions": dict(total),
        "returns": [run["returns"] for run in runs],
    }


def _figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    def at(name: str, part: float) -> float:
        return round(float(np.quantile([row[name] for row in rows], part)), 4)

    return {
        "requests": len(rows),
        "cached": round(sum(row["cached"] for row in rows) / sum(row["prompt"] for row in rows), 4),
        **{f"ttft_p{int(100 * part)}_s": at("ttft_s", part) for part in (0.5, 0.9, 0.99)},
        "ttft_mean_s": round(float(np.mean([row["ttft_s"] for row in rows])), 4),
        "tpot_p99_s": at("tpot_s", 0.99),
        "e2e_p50_s": at("e2e_s", 0.5),
        "e2e_p99_s": at("e2e_s", 0.99),
        "longest_gap_s": at("gap_s", 1.0),
    }


COLUMNS = (
    ("later turns: cached", lambda later, others: f"{100 * later['cached']:.0f} %"),
    ("TTFT p50", lambda later, others: f"{later['ttft_p50_s']:.3g} s"),
    ("p90", lambda later, others: f"{later['ttft_p90_s']:.3g} s"),
    ("mean", lambda later, others: f"{later['ttft_mean_s']:.3g} s"),
    ("TPOT p99", lambda later, others: f"{1e3 * later['tpot_p99_s']:.0f} ms"),
    ("others: TTFT p50", lambda later, others: f"{others['ttft_p50_s']:.3g} s"),
    ("mean", lambda later, others: f"{others['ttft_mean_s']:.3g} s"),
    ("TPOT p99", lambda later, others: f"{1e3 * others['tpot_p99_s']:.0f} ms"),
    ("E2E p99", lambda later, others: f"{others['e2e_p99_s']:.0f} s"),
    ("longest gap", lambda later, others: f"{max(one['longest_gap_s'] for one in (later, others)):.1f} s"),
)


def show(rows: dict[tuple[str, float, str], dict[str, Any]]) -> None:
    """Print a table with a row for each policy, size of swap space, and mode; TTFT of later turns over that of lru."""
    print("| policy | swap | mode | " + " | ".join(name for name, _ in COLUMNS) + " | of lru's p50, mean |")
    print("|---" * (len(COLUMNS) + 4) + "|")
    for (policy, swap_gb, mode), one in rows.items():
        later, others = one["groups"]["later turns"], one["groups"]["others"]
        cells = [cell(later, others) for _, cell in COLUMNS]
        if (base := rows.get((policy, swap_gb, "lru"))) is not None:
            ratios = [later[name] / base["groups"]["later turns"][name] for name in ("ttft_p50_s", "ttft_mean_s")]
            cells.append(", ".join(f"{ratio:.2f}" for ratio in ratios))
        print("| " + " | ".join([policy, f"{swap_gb:g} GB", mode, *cells]) + " |")


def main() -> None:
    """Serve the load under each policy, with each swap space, in each mode and for each seed; keep the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", nargs="+", default=["fcfs", "timely"])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--swap-gb", nargs="+", type=float, default=[32.0, 48.0])
    parser.add_argument("--load", type=float, default=1.0, help="multiple of the default rates")
    parser.add_argument("--unnamed", action="store_true", help="send no session's name")
    parser.add_argument("--trace", type=Path, help="a Mooncake trace; instead of the generated load")
    parser.add_argument("--part", type=int, default=12, help="with --trace, one in so many conversations")
    parser.add_argument("--span", type=float, default=RATES.span_s, help="seconds in which sessions begin")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    rates = Rates(RATES.agents * args.load, RATES.chats * args.load, RATES.singles * args.load, args.span)
    rows: dict[tuple[str, float, str], dict[str, Any]] = {}
    with ProcessPoolExecutor(args.workers) as workers:
        begun = {
            (policy, swap_gb, mode): [
                workers.submit(_serve, mode, policy, swap_gb * 1e9, rates, seed, args) for seed in args.seeds
            ]
            for policy in args.policies
            for swap_gb in args.swap_gb
            for mode in args.modes
        }
        for row, runs in begun.items():
            rows[row] = summarise([one.result() for one in runs])
    show(rows)
    settings = {name: str(value) for name, value in vars(args).items() if name not in ("out", "workers")}
    result = [dict(zip(("policy", "swap_gb", "mode"), row, strict=True)) | one for row, one in rows.items()]
    save_result(args.out, {"settings": settings, "rows": result})


def _serve(
    mode: str, policy: str, swap_bytes: float, rates: Rates, seed: int, args: argparse.Namespace
) -> dict[str, Any]:
    if args.trace is None:
        return serve_sessions(mode, policy, swap_bytes, rates, seed, not args.unnamed)
    return serve_trace(mode, policy, swap_bytes, read_sessions(args.trace, args.part, seed, args.span))


if __name__ == "__main__":
    main()
