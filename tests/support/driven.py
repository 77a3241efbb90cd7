"""Requests that an engine serves while a test disturbs it: their answers, and what holds after every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from floodplain.core.request import FinishReason, Request, SeqId
from floodplain.engine.outputs import EngineStats
from floodplain.engine.shell import Engine
from tests.support.parity import Reference, Verdict, judge

Disturb = Callable[[Any, int], object]
"""Called after each step with the ``Driven`` object and the step's number."""


@dataclass
class Driven:
    """An engine, the answers of its requests, and which of these were aborted."""

    engine: Engine
    outputs: dict[SeqId, list[int]] = field(default_factory=dict)
    logprobs: dict[SeqId, list[float]] = field(default_factory=dict)
    aborted: set[SeqId] = field(default_factory=set)

    def add(self, request: Request) -> SeqId:
        seq_id = self.engine.add(request)
        self.outputs[seq_id], self.logprobs[seq_id] = [], []
        return seq_id

    def drive(
        self,
        requests: Sequence[Request],
        disturb: Disturb = lambda one, step: None,
        arrivals: Callable[[], int] | None = None,
    ) -> EngineStats:
        """Run requests to their end; ledgers balance after every step, and nothing stays in use.

        ``arrivals`` returns how many requests arrive before a step; by default all are there at once.
        """
        arriving, engine, num_steps = deque(requests), self.engine, 0
        while arriving or engine.has_unfinished:
            if arriving:
                for _ in range(min(len(arriving), len(arriving) if arrivals is None else arrivals())):
                    self.add(arriving.popleft())
            for seq_id, delta in engine.step():
                self.outputs[seq_id] += delta.token_ids
                self.logprobs[seq_id] += [entry.chosen for entry in delta.logprobs or ()]
            engine.loop.check_integrity()
            disturb(self, num_steps)
            num_steps += 1
            assert num_steps < 100_000, "the engine does not come to rest"
        state, stats = engine.loop.state, engine.stats()
        assert state.ledger.num_available == state.ledger.num_blocks
        assert state.backups.is_at_rest
        assert stats.kv_bytes.get("host", 0) == 0
        return stats

    def hang_up(self, seq_id: SeqId) -> None:
        """A client aborts its request."""
        if self.engine.finish(seq_id, FinishReason.ABORT):
            self.aborted.add(seq_id)

    def verdict(self, expected: Sequence[Reference]) -> Verdict:
        """Compare with an undisturbed run, by number of sequence; aborted requests with its beginnings."""
        references = [
            expected[seq_id].cut(len(output)) if seq_id in self.aborted else expected[seq_id]
            for seq_id, output in self.outputs.items()
        ]
        logprobs = list(self.logprobs.values()) if any(self.logprobs.values()) else None
        return judge(references, list(self.outputs.values()), logprobs)
