"""TokenFlow's rule: a request whose reader still has unread tokens may pause for one whose reader has none.

Source: Chen et al., "TokenFlow: Responsive LLM Text Streaming Serving under Request Burst via Preemptive Scheduling"
(EuroSys 2026, arXiv 2510.02758), sections 3.3 and 4. Readers read at the TPOT goal from their first token on.

- Working set: requests that have a token. A new request enters only while the device generates as fast as all of them
  are read; else requests run by arrival, and no request enters (section 4.3).
- A running request may pause only if its reader's tokens last for the time that its way out and back takes (4.2.1).
- Requests are chosen greedily by the emptiest buffer, as far as KV memory has room (4.2.2). With one reading speed for
  all, the paper's utility orders them so, and its local search changes nothing.
- No request is preempted while no new one waits and no paused reader runs out of tokens.

It runs in our plug-in's scheduler, with its swap space: KV is copied out ahead and copied in beside steps, as by the
paper's KV manager (section 5). Left out: the choice to compute a request again where the link is busy, and chunked
writes that fit a step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from floodplain.core.request import SeqId
from floodplain.core.sequence import Status
from floodplain.core.view import SequenceView, View
from floodplain.plugins.vllm.scheduler import FloodplainScheduler
from floodplain.policy.base import SharingPolicy
from floodplain.policy.gate import GatedPolicy
from floodplain.policy.ranking import Ranking, live_rows, rows_in_slice
from floodplain.policy.settings import SharingSettings

SAFETY = 1.0
"""The paper's buffer conservativeness; at least 1."""
SLICE_STEPS = 3
"""About a tenth of a second: the paper's schedule interval. Of 3, 10 and 20, the best on seed 1."""
WINDOW_S = 3.0
"""Over which the throughput is averaged."""


@dataclass
class Reader:
    """Reads a token every ``1 / rate`` seconds, if there is one.

    Attributes:
        num_read: Tokens, also in parts.
        num_tokens: Those that there were at ``seen_s``.
        seen_s: The time of the last call.
    """

    num_read: float
    num_tokens: int
    seen_s: float

    def read(self, num_tokens: int, now_s: float, rate: float) -> int:
        """Go on to ``now_s``; return the number of tokens that are new."""
        self.num_read = min(float(self.num_tokens), self.num_read + (now_s - self.seen_s) * rate)
        num_new, self.num_tokens, self.seen_s = num_tokens - self.num_tokens, num_tokens, now_s
        return num_new

    @property
    def num_unread(self) -> float:
        """The reader's buffer, in tokens."""
        return self.num_tokens - self.num_read


class TokenFlowPolicy(SharingPolicy):
    """Ranks requests by their readers' buffers. It keeps the readers, so an object is for one engine."""

    name = "tokenflow"

    def __init__(self, settings: SharingSettings, tpot_goal_s: float) -> None:
        super().__init__(settings)
        self._rate = 1.0 / tpot_goal_s
        self._readers: dict[SeqId, Reader] = {}
        self._throughput = float("inf")
        self._seen_s = 0.0

    def rank(self, view: View, now: float) -> Ranking:
        """Rank requests by arrival if they are read faster than tokens are generated, else by buffer."""
        rows = sorted(live_rows(view), key=lambda row: row.order_key)
        streams = [row for row in rows if row.num_generated(view.step) > 0]
        new = [row for row in rows if row.num_generated(view.step) <= 0]
        self._read(view, streams, now)
        begun = [row for row in new if row.status is not Status.WAITING]
        num_more = int(self._throughput / self._rate) - len(streams) if self._throughput < float("inf") else len(new)
        if num_more < 0:
            return Ranking([*streams, *begun], frozenset(rows_in_slice(view, SLICE_STEPS)), SLICE_STEPS)
        chosen = [*streams, *begun, *[row for row in new if row not in begun][: max(0, num_more - len(begun))]]
        if not streams and not begun:
            chosen = chosen or new[:1]
        chosen.sort(key=lambda row: (self._lasts_s(row), row.order_key))
        return Ranking(chosen, self._find_staying(view, chosen), SLICE_STEPS)

    def _find_staying(self, view: View, chosen: Seq[SequenceView]) -> frozenset[SeqId]:
        """Return running requests that must not pause."""
        away = [row for row in chosen if row.status is not Status.RUNNING]
        if not any(self._lasts_s(row) <= _away_s(view, row) for row in away):
            return frozenset(row.seq_id for row in view.running)
        unsafe = [row.seq_id for row in view.running if self._lasts_s(row) < SAFETY * _away_s(view, row)]
        return frozenset([*unsafe, *rows_in_slice(view, SLICE_STEPS)])

    def _lasts_s(self, row: SequenceView) -> float:
        """Return for how long the reader has tokens, in seconds."""
        reader = self._readers.get(row.seq_id)
        return 0.0 if reader is None else reader.num_unread / self._rate

    def _read(self, view: View, streams: Seq[SequenceView], now: float) -> None:
        """Let all readers read, and learn the throughput."""
        known, self._readers = self._readers, {}
        num_new = 0
        for row in streams:
            reader = known.get(row.seq_id) or Reader(0.0, 0, now)
            num_new += reader.read(row.num_generated(view.step), now, self._rate)
            self._readers[row.seq_id] = reader
        duration_s, self._seen_s = now - self._seen_s, now
        if 0 < duration_s < WINDOW_S:  # after a longer time the gate was closed
            before = num_new / duration_s if self._throughput == float("inf") else self._throughput
            self._throughput = before + duration_s / WINDOW_S * (num_new / duration_s - before)


def _away_s(view: View, row: SequenceView) -> float:
    """Return the time of a request's way out and back, and of the slice that it waits for at least, in seconds."""
    link = view.tiers[0]
    return 2 * (link.latency_s + row.num_blocks * link.block_s) + SLICE_STEPS * view.prices.step_s


class TokenFlowScheduler(FloodplainScheduler):
    """Our plug-in's scheduler with the policy above."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        goal_s = self.vllm_config.additional_config["peer"]["tpot_goal_s"]
        self.policy_object = GatedPolicy(TokenFlowPolicy(SharingSettings(slice_steps=SLICE_STEPS), goal_s))
