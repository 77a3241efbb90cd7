"""Requests that hold no blocks: waiting ones in a policy's order, and those with KV in swap space.

Each is sorted in once, when it enters vLLM's queue, so that a step costs as much with ten thousand as with ten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from floodplain.core.request import OrderKey, SeqId
from floodplain.plugins.vllm.tracked import RequestRoster, TrackedRequest
from floodplain.runtime.queue import WaitingQueue

if TYPE_CHECKING:
    from vllm.v1.request import Request


class SortedQueue:
    """Sorts the requests of vLLM's queue into waiting and ``swapped`` ones (KV in swap space or on its way there).

    Args:
        roster: Of all live requests.
        key: The order of waiting requests; fixed while a request waits.
        window: The number of them that a policy sees,
        num_newest: and of the newest others.
    """

    def __init__(self, roster: RequestRoster, key: Callable[[Any], OrderKey], window: int, num_newest: int = 0) -> None:
        self._roster = roster
        self._line = WaitingQueue(key, window, num_newest, lambda _: "")  # vLLM's requests have no API key
        self.swapped: dict[SeqId, TrackedRequest] = {}
        self._blocked: dict[SeqId, TrackedRequest] = {}
        self._here: dict[str, TrackedRequest] = {}

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that wait and have nothing in swap space."""
        return len(self._line)

    def shown(self) -> tuple[TrackedRequest, ...]:
        """Return the first of these, and the newest others, each in order."""
        return cast(tuple[TrackedRequest, ...], self._line.shown())

    def refresh(self, changed: Mapping[str, Request | None], is_ready: Callable[[Request], bool]) -> None:
        """Apply changes of vLLM's queue: requests added there, or removed (None), since the last call.

        ``is_ready``: whether vLLM would admit a request now; called each time until it is true.
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
        """Make a swapped request wait, because nothing of it can be restored any more."""
        del self.swapped[one.seq_id]
        self._line.push(cast(Any, one))

    def _take_out(self, one: TrackedRequest) -> None:
        if one.seq_id in self._line:
            self._line.remove(one.seq_id)
        elif self.swapped.pop(one.seq_id, None) is None:
            del self._blocked[one.seq_id]
