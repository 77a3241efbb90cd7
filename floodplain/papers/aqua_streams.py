"""AQUA's long prompts (figures 9b, 11b, 12): FlexGen loads the KV of each layer, from DRAM or from a neighbour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from floodplain.core.layer_places import LayerPlaces, every_place
from floodplain.cost.devices import Roofline, device_named, predict_blocks
from floodplain.cost.expansion import step_stall_s
from floodplain.cost.link import LINKS
from floodplain.cost.model_shape import shape_named
from floodplain.papers.claims import Figure, Measured, Picture, Statement, Unknown
from floodplain.papers.serving import SHAREGPT, Served, poisson_rows, serve_rows

MODEL = "opt-30b"
PROMPT, OUTPUT, BLOCK_TOKENS = 8192, 32, 16
"""Tokens of a prompt, and of an output: the latter is what FlexGen's script generates by default."""
DRAM, AQUA, OWN = "FlexGen, DRAM", "FlexGen, AQUA", "Floodplain"


@dataclass(frozen=True, slots=True)
class Copying:
    """Whether layers load while others compute, and bytes per second from DRAM; None is what the paper says."""

    overlaps: bool
    dram: float | None = None


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """One sequence of OPT-30B on a device, half of its output generated.

    ``dram``: bytes per second from DRAM, as the paper says. ``nvlink``: the link to the neighbour, by name.
    """

    device: str
    dram: float
    nvlink: str
    prompt: int = PROMPT

    @property
    def step_s(self) -> float:
        """Seconds of a step whose KV is on the device."""
        return Roofline(shape_named(MODEL), device_named(self.device)).batch_s([self.prompt + OUTPUT // 2], [], 1)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return shape_named(MODEL).num_layers

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's KV."""
        shape = shape_named(MODEL)
        return (self.prompt + OUTPUT // 2) * shape.kv_bytes_per_token() // shape.num_layers

    def flexgen_s(self, copy_s: float, *, overlaps: bool) -> float:
        """Seconds a token if each layer's KV loads in ``copy_s``: into the other of two slots, else before compute."""
        if not overlaps:
            return self.step_s + self.num_layers * copy_s
        return self.step_s + step_stall_s(LayerPlaces(self.num_layers, self.num_layers, 2), self.step_s, copy_s)

    def dram_s(self, copying: Copying) -> float:
        """Seconds a token from DRAM."""
        return self.flexgen_s(self.layer_bytes / (copying.dram or self.dram), overlaps=copying.overlaps)

    def aqua_s(self, copying: Copying) -> float:
        """Seconds a token from a neighbour's memory."""
        return self.flexgen_s(LINKS[self.nvlink].inbound.time_s(self.layer_bytes), overlaps=copying.overlaps)

    def own_s(self, copying: Copying) -> float:
        """Seconds a token if only as many layers stream, over NVLink, as the rest needs room."""
        shape, copy_s = shape_named(MODEL), LINKS[self.nvlink].inbound.time_s(self.layer_bytes)
        blocks = predict_blocks(
            shape, device_named(self.device), utilisation=0.9, max_num_seqs=1, max_batched_tokens=512
        )
        needed = (self.prompt + OUTPUT) / BLOCK_TOKENS / blocks
        places = next(places for places in every_place(self.num_layers) if places.expansion >= needed)
        return self.step_s + step_stall_s(places, self.step_s, copy_s)


H100, A100 = LongPrompt("h100-80gb", 50e9, "nvlink4"), LongPrompt("a100-80gb", 25e9, "nvlink3")
UNKNOWN = Unknown(
    "way of copying",
    {
        "layer by layer beside compute": Copying(overlaps=True),
        "layer by layer beside compute, 25.7 GB/s from DRAM (a rented H100)": Copying(overlaps=True, dram=25.7e9),
        "layer by layer before compute": Copying(overlaps=False),
    },
    "layer by layer beside compute",
)
UNKNOWN_A100 = Unknown(
    UNKNOWN.name,
    {
        "layer by layer beside compute": Copying(overlaps=True),
        "layer by layer beside compute, 12.3 GB/s from DRAM (a rented A100)": Copying(overlaps=True, dram=12.3e9),
        "layer by layer before compute": Copying(overlaps=False),
        "layer by layer before compute, 12.3 GB/s from DRAM (a rented A100)": Copying(overlaps=False, dram=12.3e9),
    },
    UNKNOWN.default,
)
COMMON = (
    "A roofline stands for FlexGen's kernels; its own overheads are left out. One sequence at a time; outputs have 32 "
    "tokens, FlexGen's default; prompts are not counted.",
    "All KV is off the device, and each layer's is loaded whole in each step.",
    "Floodplain's own way: only layers that do not fit stream. All of them fit, as 80 GB leave room for 11,500 tokens.",
)


def measure_throughput(copying: Copying, seed: int) -> Measured:
    """Tokens per second of OPT-30B on one H100."""
    rates = {name: 1 / seconds for name, seconds in _ways(H100, copying).items()}
    return Measured(
        {"gain": rates[AQUA] / rates[DRAM], "own_gain": rates[OWN] / rates[DRAM]},
        Picture("way", {"tokens/s": {"OPT-30B": (list(rates), list(rates.values()))}}),
    )


def _ways(prompt: LongPrompt, copying: Copying) -> dict[str, float]:
    return {DRAM: prompt.dram_s(copying), AQUA: prompt.aqua_s(copying), OWN: prompt.own_s(copying)}


RATE, CALM_S, BUSY_S, END_S, BEGIN_S = 2.5, 120.0, 60.0, 300.0, 60.0
"""Requests per second that Llama 8B gets (section 4.1), the time until they are twice as many, for how long, the end of
the picture, and when OPT-30B begins."""
MOST_WAITING, WINDOW_S = 5, 5.0
"""Requests that wait at the producer until it recalls, and how long fewer must wait before it lends again."""


def measure_recall(copying: Copying, seed: int) -> Measured:
    """Throughput of OPT-30B on one A100 while Llama-3.1-8B on another lends, recalls and lends again."""
    calm = poisson_rows(SHAREGPT, RATE, round(RATE * CALM_S), seed)
    busy = poisson_rows(SHAREGPT, 2 * RATE, round(2 * RATE * BUSY_S), seed + 1000, CALM_S)
    engine = {"policy": "fcfs", "scheduling": "sync", "max_batched_tokens": 512}
    producer = serve_rows({"model": "llama-3.1-8b", "device": "a100-80gb", "engine": engine}, [*calm, *busy])
    times, free, waiting = _columns(producer)
    lends = lending_times(times, [number <= MOST_WAITING for number in waiting])
    seconds = _ways(A100, copying)
    begun = [(when, lent) for when, lent in zip(times, lends, strict=True) if when >= BEGIN_S]
    rates = [1 / seconds[AQUA if lent else DRAM] for _, lent in begun]
    return Measured(
        {
            "rate": max(rates),
            "gain": max(rates) / min(rates),
            "own_rate": 1 / seconds[OWN],
            "own_gain": 1 / seconds[OWN] / min(rates),
        },
        Picture(
            "seconds",
            {
                "Llama-3.1-8B:\nfree KV (GB)": {"free": (times, [one / 1e9 for one in free])},
                "waiting": {"waiting": (times, waiting)},
                "OPT-30B:\ntokens/s": {"tokens/s": ([when for when, _ in begun], rates)},
            },
        ),
    )


def _columns(served: Served) -> tuple[list[float], list[float], list[int]]:
    """(times, bytes of the KV pool that are free then, waiting requests), up to the end of the picture."""
    columns = served.result["floodplain"]["timeline"]
    block_bytes = BLOCK_TOKENS * shape_named("llama-3.1-8b").kv_bytes_per_token()
    number = sum(when <= END_S for when in columns["time_s"])
    pool = zip(columns["kv_used_blocks"], columns["kv_total_blocks"], strict=True)
    free = [float((total - used) * block_bytes) for used, total in pool]
    return columns["time_s"][:number], free[:number], columns["num_waiting"][:number]


def lending_times(times: Sequence[float], is_short: Sequence[bool]) -> list[bool]:
    """Whether memory is lent at each time: while the queue is short, again once it has been for ``WINDOW_S``."""
    lends, last_full = list[bool](), float("-inf")
    for when, short in zip(times, is_short, strict=True):
        last_full = last_full if short else when
        lends.append(when - last_full >= WINDOW_S)
    return lends


FIGURE_9B = Figure(
    name="aqua-9b",
    shows="Decoding throughput of prompts whose KV is off the device",
    setting="OPT-30B under FlexGen on one H100, prompts of 8,192 tokens",
    statements=(Statement("tokens/s with AQUA over those from DRAM", 4.0, "gain", own="own_gain"),),
    assumptions=COMMON,
    measure=measure_throughput,
    unknown=UNKNOWN,
)
FIGURE_12 = Figure(
    name="aqua-12",
    shows="Throughput of long prompts while a neighbour lends, recalls and lends again",
    setting="OPT-30B under FlexGen on one A100; Llama-3.1-8B with ShareGPT on another, whose traffic doubles at 120 s",
    statements=(
        Statement("tokens/s while memory is lent", 8.0, "rate", unit="tokens/s", own="own_rate"),
        Statement("largest over least tokens/s, while memory is recalled", 6.0, "gain", own="own_gain"),
    ),
    assumptions=(
        "Llama 8B gets the 2.5 requests/s that section 4.1 calls its limit, twice that for a minute, and then none.",
        "It recalls while more than 5 requests wait, and lends again after 5 s in which fewer do. The move of 11 GB "
        "at a recall is not drawn: it takes half a second over PCIe.",
        *COMMON,
    ),
    measure=measure_recall,
    unknown=UNKNOWN_A100,
)
