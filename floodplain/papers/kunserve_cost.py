"""KunServe's figure 15: how far models of a microbatch's time are off, with and without attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from floodplain.cost.fit import StepRow, fit_steps
from floodplain.cost.step_time import StepCost, StepWork
from floodplain.papers.claims import Figure, Measured, Picture, Statement, Unknown

DENSE_US = {
    512: 1249, 1024: 2129, 1536: 3091, 2048: 4053, 3072: 6013, 4096: 7973, 6144: 11918, 8192: 15864, 10240: 19809,
    12288: 23755, 16384: 31646,
}  # fmt: skip
"""Microseconds by tokens of the four matrices of a layer of Qwen2.5-14B on an A100.

Interpolated between sizes that the PyPI package aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0) has measured.
"""
ATTENTION_US = {
    512: 46, 1024: 109, 1536: 205, 2048: 320, 3072: 645, 4096: 1075, 6144: 2305, 8192: 3917, 10240: 6161, 12288: 8911,
    16384: 15449,
}  # fmt: skip
"""Microseconds by tokens of the causal attention of one prompt in a layer with its 40 heads and 8 KV heads."""
MEASURED = max(ATTENTION_US)
NUM_LAYERS = 48
MOST_CHUNK = 4096
"""Tokens of the longest chunk behind a prefix."""
PARTS = ("base_s", "prefill_token_s", "self_pair_s", "prefix_token_s", "prefix_pair_s")
MATRICES = ("base_s", "prefill_token_s")
Chunk = tuple[int, int]
"""Tokens before it, and its own."""


@dataclass(frozen=True, slots=True)
class Microbatches:
    """Chunks of prompts of up to ``longest`` tokens, and the seconds of each."""

    longest: int

    @property
    def prompts(self) -> list[Chunk]:
        """Whole prompts."""
        return [(0, tokens) for tokens in self._attention_us]

    @property
    def later_chunks(self) -> list[Chunk]:
        """Chunks behind a prefix, by the difference of two prompts."""
        sizes = self._attention_us
        pairs = ((before, end - before) for before in sizes for end in sizes)
        return [(before, tokens) for before, tokens in pairs if tokens in DENSE_US and tokens <= MOST_CHUNK]

    def time_s(self, chunk: Chunk) -> float:
        """Seconds of all layers: matrices and attention."""
        before, tokens = chunk
        attention_us = self._attention_us[before + tokens] - (self._attention_us[before] if before else 0.0)
        return NUM_LAYERS * (attention_us * 1e-6) + self.matrices_s(tokens)

    def matrices_s(self, tokens: int) -> float:
        """Seconds of all layers without attention; beyond the measured sizes in proportion."""
        most = min(tokens, MEASURED)
        return NUM_LAYERS * DENSE_US[most] * 1e-6 * tokens / most

    @property
    def _attention_us(self) -> Mapping[int, float]:
        beyond = {
            tokens: ATTENTION_US[MEASURED] * (tokens / MEASURED) ** 2
            for tokens in range(MEASURED, self.longest + 1, 4096)
        }
        return {tokens: us for tokens, us in ({**ATTENTION_US, **beyond}).items() if tokens <= self.longest}


def _work(chunk: Chunk) -> StepWork:
    return StepWork.of([], [chunk])


def deviations(cost: StepCost, batches: Microbatches, chunks: Sequence[Chunk]) -> list[float]:
    """Per cent by which a model is off at each chunk."""
    return [100 * abs(cost.time_s(_work(chunk)) / batches.time_s(chunk) - 1) for chunk in chunks]


def _measure(longest: int, seed: int) -> Measured:
    batches = Microbatches(longest)
    prompts, later = batches.prompts, batches.later_chunks
    ours = fit_steps([StepRow(_work(one), batches.time_s(one)) for one in (*prompts, *later)], PARTS, seed).cost
    rows = [StepRow(_work(one), batches.matrices_s(one[1])) for one in prompts]
    matrices = fit_steps(rows, MATRICES, seed).cost
    ends = [before + tokens for before, tokens in later]
    off = {
        name: (deviations(cost, batches, prompts), deviations(cost, batches, later))
        for name, cost in (("with attention", ours), ("matrices alone", matrices))
    }
    return Measured(
        {
            "ours_prompts": max(off["with attention"][0]),
            "ours_chunks": max(off["with attention"][1]),
            "matrices_prompts": max(off["matrices alone"][0]),
            "matrices_chunks": max(off["matrices alone"][1]),
        },
        Picture(
            "tokens of the prompt, up to the chunk's end",
            {
                "off by %, whole prompts": {name: ([n for _, n in prompts], whole) for name, (whole, _) in off.items()},
                "off by %, later chunks": {name: _largest(ends, part) for name, (_, part) in off.items()},
            },
        ),
    )


def _largest(places: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    most: dict[int, float] = {}
    for place, value in sorted(zip(places, values, strict=True)):
        most[place] = max(value, most.get(place, 0.0))
    return list(most), list(most.values())


FIGURE_15 = Figure(
    name="kunserve-15",
    shows="How far a model of a microbatch's time is off, with attention and without it",
    setting="Qwen2.5-14B on an A800, prompts that are whole, and chunks behind a prefix",
    statements=(
        Statement("with attention, whole prompts (less than 5 %)", 5.0, "ours_prompts", unit="%", bound="at most"),
        Statement("with attention, later chunks (less than 5 %)", 5.0, "ours_chunks", unit="%", bound="at most"),
        Statement("matrices alone, whole prompts (up to 48 %)", 48.0, "matrices_prompts", unit="%"),
        Statement("matrices alone, later chunks (up to 74 %)", 74.0, "matrices_chunks", unit="%"),
    ),
    assumptions=(
        "An A100 stands for the A800, which has the same kernels. Times are sums of measured kernels: of four matrices "
        "and attention in each layer.",
        "A later chunk takes what the longer prompt's attention takes more than the shorter one's.",
        f"Attention of more than {MEASURED:,} tokens grows with the pairs of tokens; it was not measured.",
        "The paper names no model here: Qwen2.5-14B. Floodplain's own model of a step has the same parts.",
    ),
    measure=_measure,
    unknown=Unknown(
        "longest prompt", {f"{tokens:,} tokens": tokens for tokens in (4096, 16384, 32768)}, "16,384 tokens"
    ),
)
