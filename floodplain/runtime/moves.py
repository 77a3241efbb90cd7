"""Transfers between device and swap space: prepared, copied by the executor, committed or aborted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from floodplain.core.errors import InvariantError
from floodplain.runtime.arrivals import Arrivals
from floodplain.runtime.departures import Departures
from floodplain.runtime.state import LoopState


class Moves:
    """All transfers in flight.

    Attributes:
        out: Outbound ones.
        back: Inbound ones.
    """

    def __init__(self, state: LoopState) -> None:
        numbers = count(1)
        self._state = state
        self.out = Departures(state, numbers.__next__)
        self.back = Arrivals(state, numbers.__next__)

    @property
    def num_in_flight(self) -> int:
        """Transfers that are not settled."""
        return len(self.out) + len(self.back)

    def settle(self, transfer_id: int, lost: Sequence[int], now: float) -> None:
        """End a transfer; ``lost`` are places of its blocks that did not arrive whole.

        Raises:
            InvariantError: It was not in flight.
        """
        if transfer_id in self.out:
            self.out.settle(transfer_id, lost)
        elif transfer_id in self.back:
            self.back.settle(transfer_id, lost, now)
        else:
            raise InvariantError(f"transfer {transfer_id} is answered but not in flight")
        self._state.counters.num_failed_transfers += bool(lost)
