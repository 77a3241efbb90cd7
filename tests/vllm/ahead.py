"""Async scheduling on a CPU, where vLLM's platform disables it: steps are planned ahead, and computed in order.

vLLM's scheduler, engine and model runner are unchanged. CUDA's streams and events, which a CPU lacks, are replaced:
each step has computed when its call returns, so that its tokens exist before they are read.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from vllm.platforms.cpu import CpuPlatform


class _Mark:
    """Replaces a stream or an event; its methods never wait."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, *args: Any) -> None: ...


def plan_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make later engines keep their flag ``async_scheduling``."""
    settle = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def keep(cls: type[CpuPlatform], vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        settle(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep))
    monkeypatch.setattr(torch.cuda, "Event", _Mark)
    monkeypatch.setattr(torch.cuda, "Stream", _Mark)
    monkeypatch.setattr(torch.cuda, "current_stream", _Mark)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
