"""The facts that an instance sends when it joins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from floodplain.core.ranges import Line, Port, Positive, Range


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """The facts of one instance.

    Attributes:
        version: Of Floodplain.
        fingerprint: Of the model, its number format and the kind of device (``model.weights.fingerprint``).
        dtype: Number format of weights and KV.
        max_model_len: Most tokens of a request.
        block_tokens: Tokens of a KV block.
        num_blocks: Blocks of its KV pool.
        host: The machine's name.
        pid: The process.
    """

    version: Line
    fingerprint: Line
    dtype: Line
    max_model_len: Positive
    block_tokens: Positive
    num_blocks: Positive
    host: Line
    pid: Positive


@dataclass(frozen=True, slots=True)
class StageFacts:
    """The facts of an instance that holds only some layers.

    Attributes:
        stage: Its number in the pipeline, from 0, and
        num_stages: of how many.
        host: Where it listens for the stage before, and
        port: on which port.
    """

    stage: Annotated[int, Range(0, 255)]
    num_stages: Annotated[int, Range(2, 256)]
    host: Line
    port: Port


def find_difference(first: InstanceFacts, other: InstanceFacts) -> str | None:
    """Why ``other`` cannot serve beside ``first``, and what to change; None if it can."""
    if other.version != first.version:
        return f"it is Floodplain {other.version}, and the others are {first.version}: install the same"
    for name, flag in (("dtype", "--dtype"), ("block_tokens", "--block-tokens")):
        mine, theirs = getattr(other, name), getattr(first, name)
        if mine != theirs:
            return f"{flag} {mine} is not the others' {theirs}: start it with {flag} {theirs}"
    if other.fingerprint != first.fingerprint:
        return "its model is not the others': give it the same weights, the same --seed if it is a dummy, and --device"
    if other.max_model_len < first.max_model_len:
        mine, theirs = other.max_model_len, first.max_model_len
        return f"it serves {mine} tokens a request, and the others {theirs}: give it more --kv-memory"
    return None
