"""Requests that hold no blocks: those that wait, in a policy's order, and those that have KV in swap space.

vLLM has them in one queue. Here each stands in its place from the time it comes there, so that a step costs as much
with ten thousand in the queue as with ten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from floodplain.core.request import OrderKey, SeqId
from floodplain.plugins.vllm.tracked import RequestRoster, TrackedRequest
from floodplain.runtime.queue import WaitingQueue

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Lobby:
    """See the module.

    Args:
        roster: Of all live requests.
        key: The order of those that wait; fixed for as long as one does.
        window: The number of them that a policy sees.

    Attributes:
        swapped: Requests with KV in swap space, or on its way there.
    """

    def __init__(self, roster: RequestRoster, key: Callable[[Any], OrderKey], window: int) -> None:
        self._roster = roster
        self._line = WaitingQueue(key, window)
        self.swapped: dict[SeqId, TrackedRequest] = {}
        self._blocked: dict[SeqId, TrackedRequest] = {}
        self._here: dict[str, TrackedRequest] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that wait and have nothing in swap space."""
        return len(self._line)

    def head(self) -> tuple[TrackedRequest, ...]:
        """The first of them, in order."""
        return cast(tuple[TrackedRequest, ...], self._line.head())

    def refresh(self, changed: Mapping[str, Request | None], is_ready: Callable[[Request], bool]) -> None:
        """Follow vLLM's queue.

        Args:
            changed: Requests that came there, or left it (None), since the last call.
            is_ready: Whether vLLM would admit a request now; asked in each call until it is so.
        """
        for request_id, request in changed.items():
            known = self._here.pop(request_id, None)
            if known is not None:
                self._take_out(known)
            if request is not None:
                one = self._here[request_id] = self._roster[request_id]
                self._blocked[one.seq_id] = one
        for one in [one for one in self._blocked.values() if is_ready(one.request)]:
            del self._blocked[one.seq_id]
            if one.has_kv:
                self.swapped[one.seq_id] = one
            else:
                self._line.push(cast(Any, one))

    def wait(self, one: TrackedRequest) -> None:
        """Nothing of a swapped request can be restored any more: it waits like all others."""
        del self.swapped[one.seq_id]
        self._line.push(cast(Any, one))

    def _take_out(self, one: TrackedRequest) -> None:
        if one.seq_id in self._line:
            self._line.remove(one.seq_id)
        elif self.swapped.pop(one.seq_id, None) is None:
            del self._blocked[one.seq_id]
