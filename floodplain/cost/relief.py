"""Tokens per second of an overloaded cluster, and the initial cost of each way to relieve it. Pure.

A step of ``n`` streams takes ``base_s + n token_s``. More streams in memory give more tokens as long as the base, which
loads parameters, is a large part of the step: that is all that more KV memory can gain. If the base is zero, the
device is compute-bound, and no lever gives more tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

EVEN_BUBBLE = {1: 0.0, 2: 0.02, 3: 0.04, 4: 0.055}
"""Idle share of the stages' time with microbatches of equal cost (docs/design/017); uneven layers add to it."""

EXCHANGE_LOSS = 0.5
"""Share of tokens lost during an exchange: handed-over requests wait, new ones run."""


@dataclass(frozen=True, slots=True)
class StreamStep:
    """The time of a step by its number of streams.

    Attributes:
        base_s: Seconds of any step.
        token_s: Seconds for each stream: its decode, and the prompt tokens per output token.
        prompt_token_s: Seconds for each token of a prompt.
    """

    base_s: float
    token_s: float
    prompt_token_s: float = 0.0

    def tokens_per_s(self, num_streams: float) -> float:
        """Output tokens per second of an instance with ``num_streams`` streams in memory."""
        return num_streams / (self.base_s + num_streams * self.token_s)

    def pipeline_tokens_per_s(
        self, num_streams: float, num_stages: int, hop_s: float = 0.0, bubble: float | None = None
    ) -> float:
        """Output tokens per second of a pipeline: each stage has a share of the layers, and of the streams at a time.

        Args:
            num_streams: Streams in the memory of the group.
            num_stages: Stages of the pipeline.
            hop_s: Seconds from one stage to the next.
            bubble: Idle share of the stages' time; None: that of equal stages.
        """
        idle = EVEN_BUBBLE.get(num_stages, max(EVEN_BUBBLE.values())) if bubble is None else bubble
        cycle_s = self.base_s + num_streams / num_stages * self.token_s + num_stages * hop_s
        return num_streams / cycle_s * (1 - idle)


@dataclass(frozen=True, slots=True)
class TurnCost:
    """The KV that streams move when they take turns.

    Attributes:
        kv_bytes: KV of a stream in the middle of its life.
        context_tokens: Tokens of this KV.
        slice_tokens: Tokens that a stream generates in a turn.
        turning: Share of the memory for streams that take turns; the rest is for streams that run to their end.
    """

    kv_bytes: float
    context_tokens: float
    slice_tokens: float
    turning: float = 0.6

    def swap_tokens_per_s(self, tokens_per_s: float, bandwidth: float) -> float:
        """Tokens per second with turns, each of which swaps in over a link of ``bandwidth``.

        Copies overlap with steps until the link is saturated; then it limits the streams that take turns.

        Args:
            tokens_per_s: Tokens per second without turns.
            bandwidth: Bytes per second of the link.
        """
        wanted = self.turning * tokens_per_s
        possible = bandwidth / self.kv_bytes * self.slice_tokens
        return tokens_per_s - wanted + min(wanted, possible)

    def recompute_tokens_per_s(self, step: StreamStep, num_streams: float) -> float:
        """Tokens per second if each turn begins with recomputing the whole context."""
        again_s = self.turning * self.context_tokens * step.prompt_token_s / self.slice_tokens
        return num_streams / (step.base_s + num_streams * (step.token_s + again_s))


@dataclass(frozen=True, slots=True)
class DropCost:
    """The cost of a drop before it gains.

    Attributes:
        remap_s: Seconds for which members are paused to unmap and map pages.
        exchange_bytes: KV that each member sends, all members at once.
        bandwidth: Bytes per second of the link between members.
    """

    remap_s: float
    exchange_bytes: float
    bandwidth: float

    @property
    def exchange_s(self) -> float:
        """Seconds until the last request that was handed over runs again."""
        return self.exchange_bytes / self.bandwidth

    @property
    def pause_s(self) -> float:
        """The cost of a drop in seconds of lost tokens."""
        return self.remap_s + EXCHANGE_LOSS * self.exchange_s


def exchanged_bytes(kv_bytes: float, num_stages: int) -> float:
    """KV that a member sends in a drop: the layers of its KV that the other members keep."""
    return kv_bytes * (num_stages - 1) / num_stages
