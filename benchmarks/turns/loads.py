"""Multi-turn loads: agents that call tools, chats, and single requests; or the sessions of a recorded trace.

A session is fixed by the seed before anything is served: what each turn adds to the prompt, how long its answer is, and
how long after the end of the turn before it begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from floodplain.workload.traces import MOONCAKE_BLOCK_TOKENS, TraceRow, load_trace

MOST_TOKENS = 32_000
"""A session ends before its prompt would be longer."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: tokens that its prompt adds to all that was said, output tokens, seconds since the turn before."""

    new_tokens: int
    output_tokens: int
    gap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation; ``turns[0]`` arrives at ``arrival_s``."""

    kind: str
    arrival_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Rates:
    """New sessions per second of each kind, for ``span_s`` seconds."""

    agents: float
    chats: float
    singles: float
    span_s: float


def make_sessions(rates: Rates, seed: int) -> list[Session]:
    """The sessions of a seed, by arrival."""
    made: list[Session] = []
    for kind, rate in (("agent", rates.agents), ("chat", rates.chats), ("single", rates.singles)):
        dice = Random(f"{seed} {kind}")
        arrival_s = 0.0
        while rate and (arrival_s := arrival_s + dice.expovariate(rate)) < rates.span_s:
            made.append(Session(kind, arrival_s, tuple(_fitting(_TURNS[kind](dice)))))
    return sorted(made, key=lambda one: one.arrival_s)


def _agent(dice: Random) -> Iterator[Turn]:
    """10 to 40 calls of a model with tools between them: 86 % of the gaps are under a second, the others about 20 s."""
    yield Turn(int(dice.lognormvariate(8.7, 0.5)), dice.randint(30, 200))
    for _ in range(dice.randint(9, 39)):
        gap_s = dice.uniform(0.05, 1.0) if dice.random() < 0.86 else dice.lognormvariate(3.0, 1.0)
        yield Turn(int(dice.lognormvariate(6.5, 0.8)), dice.randint(30, 200), gap_s)


def _chat(dice: Random) -> Iterator[Turn]:
    """A person who reads and types for about 100 s, and goes on with the chance of Mooncake's conversations."""
    yield Turn(int(dice.lognormvariate(8.8, 1.1)), _answer(dice))
    for turn in range(50):
        if dice.random() > (0.40, 0.38, 0.43, 0.52, 0.62)[min(turn, 4)]:
            return
        yield Turn(max(12, int(dice.lognormvariate(6.5, 1.4))), _answer(dice), dice.lognormvariate(4.6, 0.9))


def _single(dice: Random) -> Iterator[Turn]:
    yield Turn(int(dice.lognormvariate(8.8, 1.1)), _answer(dice))


def _answer(dice: Random) -> int:
    return max(4, int(dice.lognormvariate(5.5, 0.7)))


_TURNS = {"agent": _agent, "chat": _chat, "single": _single}


def _fitting(turns: Iterator[Turn]) -> Iterator[Turn]:
    total = 0
    for index, turn in enumerate(turns):
        total += turn.new_tokens + turn.output_tokens
        if index and total > MOST_TOKENS:
            return
        yield turn if index else Turn(min(turn.new_tokens, MOST_TOKENS), turn.output_tokens)


@dataclass(frozen=True, slots=True)
class Replay:
    """One recorded request: when it arrives, its prompt, its output tokens, and the row that it continues (or None)."""

    arrival_s: float
    prompt: tuple[int, ...]
    output_tokens: int
    continues: int | None


def read_sessions(path: Path, part: int, seed: int, span_s: float) -> list[Replay]:
    """One in ``part`` of a Mooncake trace's conversations, with all of their rows, in its first ``span_s`` seconds.

    Conversations with a prompt of more than ``MOST_TOKENS`` are left out.
    """
    rows = [row for row in load_trace(path).rows if row.arrival_s < span_s]
    before = _find_continued(rows)
    roots: list[int] = []
    for index, earlier in enumerate(before):
        roots.append(index if earlier is None else roots[earlier])
    too_long = {root for row, root in zip(rows, roots, strict=True) if row.prompt_tokens > MOST_TOKENS}
    is_chosen = {root: root not in too_long and not Random(f"{seed} {root}").randrange(part) for root in set(roots)}
    chosen = [index for index, root in enumerate(roots) if is_chosen[root]]
    ids = _name_last_blocks(rows, before)
    places = {index: place for place, index in enumerate(chosen)}
    return [
        Replay(
            rows[index].arrival_s,
            _prompt_of(ids[index], rows[index].prompt_tokens),
            rows[index].output_tokens,
            None if before[index] is None else places[before[index]],  # type: ignore[index]
        )
        for index in chosen
    ]


def _find_continued(rows: list[TraceRow]) -> list[int | None]:
    """For each row the latest earlier one whose full blocks, at least two, its prompt begins with."""
    latest: dict[tuple[int, ...], int] = {}
    found = []
    for index, row in enumerate(rows):
        lengths = range(len(row.prefix_ids), 1, -1)
        found.append(next((latest[row.prefix_ids[:n]] for n in lengths if row.prefix_ids[:n] in latest), None))
        latest[row.prefix_ids[: row.prompt_tokens // MOONCAKE_BLOCK_TOKENS]] = index
    return found


def _name_last_blocks(rows: list[TraceRow], before: list[int | None]) -> list[tuple[int, ...]]:
    """The ids of each row's blocks, its last, partly filled one named as in the row that continues it.

    The trace names a block by its whole content, and the row that continues it has filled that block.
    """
    ids = [row.prefix_ids for row in rows]
    for index in reversed(range(len(rows))):
        earlier = before[index]
        if earlier is not None:
            num_full = rows[earlier].prompt_tokens // MOONCAKE_BLOCK_TOKENS
            ids[earlier] = ids[earlier][:num_full] + ids[index][num_full : len(ids[earlier])]
    return ids


def _prompt_of(ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """Token ids: a run of numbers for each block."""
    tokens = [number * MOONCAKE_BLOCK_TOKENS + place for number in ids for place in range(MOONCAKE_BLOCK_TOKENS)]
    return tuple(tokens[:num_tokens])
