"""What an engine does now, read beside its thread: the rows of its requests, its leases, and why requests wait."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from floodplain.core.plan import Reason
from floodplain.engine.shell import Engine
from floodplain.lending.neighbours import Neighbours
from floodplain.live.rows import LeaseRow, LiveView, Row, SequenceRows

WHY: Mapping[str, str] = {
    Reason.CROWDED.value: "newcomers wait, because turns have become rare",
    Reason.PROMISED.value: "the device is claimed by requests that have begun",
    Reason.PROMPT_BOUND.value: "newcomers wait, because prompts are most of the work",
    Reason.LINK_BUSY.value: "slices are long, because the link to swap space is busy",
    Reason.SWAP_SLOW.value: "no turns are taken, because recomputing is faster than a swap-in",
    Reason.SWAP_FULL.value: "swap space is full",
    Reason.NO_SWAP.value: "there is no swap space, so no turns are taken",
}
"""Why requests wait, by the value of a limit (``core.plan.LIMITS``)."""
_MOST_LEASES = 64


class EngineWatch:
    """Looks at an engine, on any thread; values of one look may be of different moments within a step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rows = SequenceRows()
        self._limited: Mapping[str, int] = dict(engine.loop.state.counters.limited_steps)

    def __call__(self) -> LiveView:
        """The engine now."""
        state = self._engine.loop.state
        rows = self._rows.look(list(state.sequences.values()))
        limited, before = dict(state.counters.limited_steps), self._limited
        self._limited = limited
        return LiveView(
            now_s=self._engine.clock(),
            rows=rows,
            why=why_waiting(
                rows.values(),
                max_num_seqs=state.config.max_num_seqs,
                block_tokens=state.ledger.block_tokens,
                num_available=state.ledger.num_available,
                limits=[name for name, count in limited.items() if count > before.get(name, 0)],
            ),
            leases=lease_rows(self._engine.neighbours),
        )


def why_waiting(
    rows: Iterable[Row], *, max_num_seqs: int, block_tokens: int, num_available: int, limits: Iterable[str]
) -> str | None:
    """Why requests wait, by the one that arrived first; None if none does. ``limits`` are those of recent decisions."""
    absent, num_present, num_prompts = [], 0, 0
    for row in rows:
        if row.state in ("waiting", "swapped"):
            absent.append(row)
        else:
            num_present += row.reason is None
            num_prompts += row.reason is None and row.first_token_s is None
    if not absent:
        return None
    if num_present >= max_num_seqs:
        return f"all {max_num_seqs} places on the device are taken (--max-num-seqs)"
    first = min(absent, key=lambda row: row.number)
    needed = -(-(first.prompt + first.tokens + 1) // block_tokens)
    if needed > num_available:
        return f"memory is short: the first request in line needs {needed} KV blocks, and {num_available} can be had"
    known = next((WHY[name] for name in limits if name in WHY), None)
    if known is None and first.state == "waiting" and num_prompts:
        return "prompts of other requests are computed first, at most --max-batched-tokens tokens a step"
    return known or "it is the turn of other requests"


def lease_rows(neighbours: Neighbours | None) -> list[LeaseRow]:
    """The leases of an engine, those that are recalled first."""
    if neighbours is None:
        return []
    membership = neighbours.agent.membership
    rows = []
    for role, peer, num_bytes, due_in_s in membership.list_leases():
        ends = (membership.name, peer) if role == "producer" else (peer, membership.name)
        rows.append(LeaseRow(*ends, num_bytes, due_in_s))
    rows.sort(key=lambda row: float("inf") if row.due_in_s is None else row.due_in_s)
    return rows[:_MOST_LEASES]
