"""AQUA's figures 10 and 11: what lending costs the lender. What copies take from it is assumed, not predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from floodplain.cost.devices import Device, Roofline, device_named
from floodplain.cost.link import LINKS
from floodplain.cost.model_shape import ModelShape
from floodplain.papers.aqua_streams import AQUA, DRAM, H100, Copying, LongPrompt
from floodplain.papers.claims import Figure, Measured, Picture, Statement, Unknown
from floodplain.papers.serving import SHAREGPT, poisson_rows, scenario_of, serve_rows
from floodplain.workload.traces import TraceRow

NUM_REQUESTS = 150
BESIDE, BEFORE = Copying(overlaps=True), Copying(overlaps=False)
ENGINE = {"policy": "fcfs", "scheduling": "sync", "max_batched_tokens": 512}
ALONE, LENDING = "alone", "lending"
BARS = ("AudioGen: throughput", "SD-3: throughput", "Llama-3.1-8B: TPOT")

AUDIOGEN = ModelShape(
    name="audiogen-medium", family="opt", num_layers=48, hidden_size=1536, num_heads=24, num_kv_heads=24, head_dim=64,
    ffn_size=6144, vocab_size=8192, max_position=2048,
)  # fmt: skip
SD3 = ModelShape(
    name="sd-3-medium", family="opt", num_layers=24, hidden_size=1536, num_heads=24, num_kv_heads=24, head_dim=64,
    ffn_size=6144, vocab_size=1, max_position=8192,
)  # fmt: skip
AUDIO_BATCH, AUDIO_TOKENS = 32, 250
IMAGE_BATCH, IMAGE_TOKENS = 16, 4250
"""Sequences and contexts of AudioGen half way through 10 s of sound, and of SD-3: 8 images of 1,024 pixels, each with
and without its text, of 4,096 patches beside the text's tokens."""


@dataclass(frozen=True, slots=True)
class Contention:
    """What copying takes from the lender's GPU.

    Attributes:
        memory: Bytes of memory traffic that a copied byte costs.
        links: Part of its links that a sum over GPUs loses while a neighbour copies.
        copying: How OPT-30B copies.
    """

    memory: float
    links: float
    copying: Copying = BESIDE

    def slow(self, device: Device, prompt: LongPrompt) -> Device:
        """The lender's device, on average over time, while OPT-30B loads its KV from it."""
        copying_s = prompt.layer_bytes * prompt.num_layers / LINKS[prompt.nvlink].inbound.peak_bandwidth
        share = min(1.0, copying_s / prompt.aqua_s(self.copying))
        taken = self.memory * share * LINKS[prompt.nvlink].inbound.peak_bandwidth
        sums = replace(device.all_reduce, bandwidth=device.all_reduce.bandwidth * (1 - self.links * share))
        return replace(device, bandwidth=device.bandwidth - taken, all_reduce=sums)


UNKNOWN_SHARE = Unknown(
    "contention",
    {
        "1 byte of memory traffic a copied byte, links unharmed": Contention(1.0, 0.0),
        "1 byte of memory traffic a copied byte, half of the links": Contention(1.0, 0.5),
        "2 bytes of memory traffic a copied byte, half of the links": Contention(2.0, 0.5),
        "4 bytes of memory traffic a copied byte, half of the links": Contention(4.0, 0.5),
        "2 bytes of memory traffic a copied byte, links unharmed, copies before compute": Contention(2.0, 0.0, BEFORE),
    },
    "1 byte of memory traffic a copied byte, half of the links",
)
CONTENTION = "contention as assumed"
COMMON = (
    "How copies disturb compute is an assumption, not a prediction: they take memory and link bandwidth from it in "
    "proportion to the time in which OPT-30B copies.",
    "A roofline of the H100 stands for all kernels.",
)


def _tpots_s(model: str, num_shards: int, device: Device, rows: Sequence[TraceRow]) -> tuple[float, ...]:
    scenario = scenario_of({"model": model, "device": device.name, "tensor_parallel": num_shards, "engine": ENGINE})
    return serve_rows(replace(scenario, device=device), rows).tpot_s


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def measure_lenders(contention: Contention, seed: int) -> Measured:
    """Throughput of AudioGen and SD-3, and TPOT of Llama 8B, alone and lending."""
    plain = device_named(H100.device)
    rows = poisson_rows(SHAREGPT, 5.0, NUM_REQUESTS, seed)
    devices = {ALONE: plain, LENDING: contention.slow(plain, H100)}
    tpot_ms = {name: 1e3 * _mean(_tpots_s("llama-3.1-8b", 1, device, rows)) for name, device in devices.items()}
    audio = {name: AUDIO_BATCH / _audio_s(device) for name, device in devices.items()}
    images = {name: IMAGE_BATCH / _image_s(device) for name, device in devices.items()}
    bars = {
        name: [audio[name] / audio[ALONE], images[name] / images[ALONE], tpot_ms[name] / tpot_ms[ALONE]]
        for name in devices
    }
    return Measured(
        {
            "audio_loss": 100 * (1 - audio[LENDING] / audio[ALONE]),
            "image_rate": images[LENDING] / images[ALONE],
            "tpot_ms": tpot_ms[LENDING] - tpot_ms[ALONE],
        },
        Picture("lender", {"relative to alone": {name: (BARS, values) for name, values in bars.items()}}),
    )


def _audio_s(device: Device) -> float:
    return Roofline(AUDIOGEN, device).batch_s([AUDIO_TOKENS] * AUDIO_BATCH, [], AUDIO_BATCH)


def _image_s(device: Device) -> float:
    return Roofline(SD3, device).batch_s([], [(0, IMAGE_TOKENS)] * IMAGE_BATCH, 0)


RATE_70B = 2.0


def measure_distributed(contention: Contention, seed: int) -> Measured:
    """TPOT of Llama 70B on four GPUs that lend to an OPT-30B each, and the throughput of these."""
    plain = device_named(H100.device)
    rows = poisson_rows(SHAREGPT, RATE_70B, NUM_REQUESTS, seed)
    tpots_ms = {
        name: [1e3 * tpot for tpot in _tpots_s("llama-3.1-70b", 4, device, rows)]
        for name, device in {ALONE: plain, LENDING: contention.slow(plain, H100)}.items()
    }
    copying = contention.copying
    rates = {DRAM: 4 / H100.dram_s(copying), AQUA: 4 / H100.aqua_s(copying)}
    return Measured(
        {
            "tpot_loss": 100 * (_mean(tpots_ms[LENDING]) / _mean(tpots_ms[ALONE]) - 1),
            "gain": rates[AQUA] / rates[DRAM],
            "own_gain": H100.dram_s(copying) / H100.own_s(copying),
        },
        Picture(
            "request, in order of arrival",
            {
                "TPOT of Llama-70B (ms)": {
                    name: (list(range(1, len(values) + 1)), values) for name, values in tpots_ms.items()
                },
            },
        ),
    )


FIGURE_10 = Figure(
    name="aqua-10",
    shows="What lending costs producers on one GPU each",
    setting="AudioGen, Stable Diffusion 3 and Llama-3.1-8B (5 requests/s of ShareGPT) on an H100 each",
    statements=(
        Statement("throughput that AudioGen loses", 5.0, "audio_loss", unit="%", bound="at most", assumed=CONTENTION),
        Statement(
            "throughput of image generation while it lends, of that alone", 1.0, "image_rate", assumed=CONTENTION
        ),
        Statement("what Llama 8B's mean TPOT grows by", 4.5, "tpot_ms", unit="ms", assumed=CONTENTION),
    ),
    assumptions=(
        *COMMON,
        "AudioGen is a decoder of 48 layers with 32 sequences; SD-3 one of 24 layers that computes 8 images at once.",
        "All lend to OPT-30B with 8,192 tokens; in the paper one of the Llama 8B lends to half of Llama 70B.",
    ),
    measure=measure_lenders,
    unknown=UNKNOWN_SHARE,
)
FIGURE_11 = Figure(
    name="aqua-11",
    shows="What lending costs a distributed producer, and what it gains its borrowers",
    setting="Llama-3.1-70B on four H100 (tensor parallel) with ShareGPT; an OPT-30B under FlexGen borrows from each",
    statements=(
        Statement("what Llama 70B's mean TPOT grows by", 5.0, "tpot_loss", unit="%", assumed=CONTENTION),
        Statement("tokens/s of four OPT-30B with AQUA over those from DRAM", 4.0, "gain", own="own_gain"),
    ),
    assumptions=(
        *COMMON,
        f"Llama 70B gets {RATE_70B:g} requests/s: the paper does not tell its rate.",
        "FlexGen copies each layer's KV beside compute, as in aqua-9b, where nothing else is said.",
    ),
    measure=measure_distributed,
    unknown=UNKNOWN_SHARE,
)
