"""A request that has ended, with what is known of its life: the source of histograms and traces."""

from __future__ import annotations

from dataclasses import dataclass

from floodplain.core.lifecycle import Lifecycle
from floodplain.core.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request, its events and why it ended."""

    request: Request
    lifecycle: Lifecycle
    reason: FinishReason
