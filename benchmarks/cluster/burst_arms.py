"""The arms of the burst benchmark: flags of ``serve``, and what the harness asks the router for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from floodplain.model.weights.open_model import open_model
from floodplain.policy.drop import DropMove

BLOCK_TOKENS = 16
MAX_MODEL_LEN = 256
REFERENCE_BLOCKS = 512
_FCFS = ("--policy", "fcfs", "--swap", "none")
_PACED = ("--policy", "paced", "--swap", "host")
_PLAIN = ("--no-pack-weights",)
_MANUAL = ("--relief", "manual")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve: flags of ``serve`` beside those of all arms.

    ``asks``: moves that the harness asks for when ``policy/drop.py`` decides on them; none if the router decides
    itself, or never drops.
    """

    flags: tuple[str, ...]
    asks: frozenset[DropMove] = frozenset()


_BOTH = frozenset({DropMove.DROP, DropMove.RESTORE})
ARMS: Mapping[str, Arm] = {
    "recompute": Arm(_FCFS),
    "recompute, plain": Arm((*_FCFS, *_PLAIN)),
    "paced": Arm(_PACED),
    "paced, plain": Arm((*_PACED, *_PLAIN)),
    "migrate": Arm((*_FCFS, "--relief", "migrate")),
    "pipeline": Arm(("--pipeline",)),
    "drop": Arm((*_FCFS, *_MANUAL), _BOTH),
    "drop, kept": Arm((*_FCFS, *_MANUAL), frozenset({DropMove.DROP})),
    "drop, paced": Arm((*_PACED, *_MANUAL), _BOTH),
    "relief drop": Arm((*_PACED, "--relief", "drop")),
    "auto": Arm((*_PACED, "--relief", "auto")),
}
"""By name. Instances preempt by recomputing (``fcfs``), as vLLM does, or take turns over the host's memory (``paced``);
matrices are packed but in *plain* arms and in those with ``--relief``."""


def common_flags(model: str, blocks: int) -> list[str]:
    """Flags of every server: fp32, so many KV blocks an engine, no cached prefixes."""
    kv_bytes = blocks * BLOCK_TOKENS * open_model(model).config.shape.kv_bytes_per_token(4)
    return [
        "--dtype", "float32", "--kv-memory", str(kv_bytes), "--max-model-len", str(MAX_MODEL_LEN),
        "--block-tokens", str(BLOCK_TOKENS), "--no-enable-prefix-caching", "--port", "0",
    ]  # fmt: skip


def command_of(name: str, model: str, blocks: int) -> list[str]:
    """The verb and the flags of an arm: two instances, each with memory for the model and so many blocks."""
    return ["serve", model, *common_flags(model, blocks), "--instances", "2", *ARMS[name].flags]


def reference_command(model: str) -> list[str]:
    """One engine with memory for all that is asked: its tokens are the right ones."""
    return ["serve", model, *common_flags(model, REFERENCE_BLOCKS), "--policy", "fcfs", "--swap", "none"]
