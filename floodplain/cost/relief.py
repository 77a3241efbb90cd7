"""How many tokens per second an overloaded cluster makes, and what each way to relieve it costs first. Pure.

A step of ``n`` streams takes ``base_s + n token_s``. More streams in memory make more tokens as long as the base, which
loads parameters, is a good part of the step: that is all that more KV memory can gain. Where the base is nothing, the
device is bound by compute, and no lever makes more tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

EVEN_BUBBLE = {1: 0.0, 2: 0.02, 3: 0.04, 4: 0.055}
"""Part of the stages' time that is idle, with microbatches of equal cost (docs/design/017); uneven layers add to it."""

EXCHANGE_LOSS = 0.5
"""Part of a second's tokens that a second of exchange costs: requests that are handed over wait, new ones run."""


@dataclass(frozen=True, slots=True)
class StreamStep:
    """The time of a step that is full of streams.

    Attributes:
        base_s: Of any step.
        token_s: For each stream: its decode, and the part of a prompt that comes with each output token.
        prompt_token_s: For each token of a prompt.
    """

    base_s: float
    token_s: float
    prompt_token_s: float = 0.0

    def tokens_per_s(self, num_streams: float) -> float:
        """Output of an instance whose memory holds so many streams."""
        return num_streams / (self.base_s + num_streams * self.token_s)

    def pipeline_tokens_per_s(
        self, num_streams: float, num_stages: int, hop_s: float = 0.0, bubble: float | None = None
    ) -> float:
        """Output of a pipeline: its streams are divided over the stages, and each stage has a part of the layers.

        Args:
            num_streams: That the memory of the group holds.
            num_stages: Of the pipeline.
            hop_s: From one stage to the next.
            bubble: Idle part of the stages' time; None takes that of equal stages.
        """
        idle = EVEN_BUBBLE.get(num_stages, max(EVEN_BUBBLE.values())) if bubble is None else bubble
        cycle_s = self.base_s + num_streams / num_stages * self.token_s + num_stages * hop_s
        return num_streams / cycle_s * (1 - idle)


@dataclass(frozen=True, slots=True)
class TurnCost:
    """What streams that take turns move.

    Attributes:
        kv_bytes: Of a stream in the middle of its life.
        context_tokens: Tokens that these are.
        slice_tokens: That a stream generates in a turn.
        turning: Part of the memory that takes turns; the rest belongs to streams that run to their end.
    """

    kv_bytes: float
    context_tokens: float
    slice_tokens: float
    turning: float = 0.6

    def swap_tokens_per_s(self, tokens_per_s: float, bandwidth: float) -> float:
        """Tokens per second with turns over a link that is busy one way with each turn's return.

        Copies hide behind steps until the link is full; then it sets the pace of the streams that take turns.

        Args:
            tokens_per_s: Without turns.
            bandwidth: Of the link, bytes per second.
        """
        wanted = self.turning * tokens_per_s
        possible = bandwidth / self.kv_bytes * self.slice_tokens
        return tokens_per_s - wanted + min(wanted, possible)

    def recompute_tokens_per_s(self, step: StreamStep, num_streams: float) -> float:
        """Tokens per second if each turn begins with its whole context, computed again like a prompt."""
        again_s = self.turning * self.context_tokens * step.prompt_token_s / self.slice_tokens
        return num_streams / (step.base_s + num_streams * (step.token_s + again_s))


@dataclass(frozen=True, slots=True)
class DropCost:
    """What a drop takes before it gains.

    Attributes:
        remap_s: For which members are paused: unmapping and mapping pages.
        exchange_bytes: KV that each member sends, all members at once.
        bandwidth: Of the link between members, bytes per second.
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
        """Seconds of all tokens that are lost."""
        return self.remap_s + EXCHANGE_LOSS * self.exchange_s


def exchanged_bytes(kv_bytes: float, num_stages: int) -> float:
    """KV that a member sends in a drop: of what it holds, the layers that the other members keep."""
    return kv_bytes * (num_stages - 1) / num_stages
