"""A request that has ended, with what is known of its life: the source of histograms and traces."""

from __future__ import annotations

from dataclasses import dataclass

from floodplain.core.lifecycle import Lifecycle
from floodplain.core.plan import TransferKind
from floodplain.core.request import FinishReason, Request
from floodplain.core.tiers import Tier


@dataclass(frozen=True, slots=True)
class CopiedKV:
    """A copy of a request's KV between the device and one tier of swap space, from its order to its end."""

    kind: TransferKind
    tier: Tier
    num_bytes: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request, its events and why it ended; ``copies`` by their ends, empty unless the engine records them."""

    request: Request
    lifecycle: Lifecycle
    reason: FinishReason
    copies: tuple[CopiedKV, ...] = ()
