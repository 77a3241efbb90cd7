"""Floodplain keeps LLM servers responsive when requests outgrow GPU memory.

The names below are imported on first use, so that ``import floodplain`` and every pure floor stay light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from floodplain.core.sampling import SamplingParams
    from floodplain.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from floodplain.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from floodplain.core.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'floodplain' has no attribute {name!r}")
