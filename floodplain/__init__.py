"""Floodplain keeps LLM servers responsive when requests outgrow GPU memory.

The names below are imported on first use, so that ``import floodplain`` and every pure floor stay light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from floodplain.core.sampling import SamplingParams
    from floodplain.engine.llm import LLM
    from floodplain.lending.elastic import ElasticPool, ElasticTensor, TensorLost
    from floodplain.memory.peer.memory import HostPeerMemory

__version__ = "0.2.0"
__all__ = ["LLM", "ElasticPool", "ElasticTensor", "HostPeerMemory", "SamplingParams", "TensorLost", "__version__"]

_HOMES = {
    "LLM": "floodplain.engine.llm",
    "SamplingParams": "floodplain.core.sampling",
    "ElasticPool": "floodplain.lending.elastic",
    "ElasticTensor": "floodplain.lending.elastic",
    "TensorLost": "floodplain.lending.elastic",
    "HostPeerMemory": "floodplain.memory.peer.memory",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'floodplain' has no attribute {name!r}")
