"""A copy between vLLM's blocks and swap space that has begun and not ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from floodplain.core.backups import Backup
from floodplain.core.plan import TransferKind
from floodplain.core.tiers import Direction
from floodplain.plugins.vllm.tracked import TrackedRequest


@dataclass(slots=True)
class Copy:
    """A copy under way.

    Attributes:
        tracked: The request.
        kind: The purpose.
        backups: One for each block.
        blocks: vLLM's.
        is_holding: The copy holds its blocks by references of its own.
        is_void: The KV that it copies is invalid by now.
    """

    tracked: TrackedRequest
    kind: TransferKind
    backups: tuple[Backup, ...]
    blocks: tuple[Any, ...]
    is_holding: bool
    is_void: bool = False

    @property
    def is_inbound(self) -> bool:
        """Whether it copies from swap space into blocks."""
        return self.kind.direction is Direction.INBOUND

    @property
    def held(self) -> tuple[Any, ...]:
        """Return the blocks that it holds."""
        return self.blocks if self.is_holding else ()
