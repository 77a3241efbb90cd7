"""When it pays to let layers of the KV cache stream: the closed form, and the engine's loop in virtual time beside it.

python -m benchmarks.expansion.formula --out benchmarks/expansion     # a minute; writes formula.md and formula.png
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.expansion.loop_check import Checked, check
from floodplain.cost.expansion import best_expansion, best_places, expansion_gain
from floodplain.cost.link import GB, LINKS
from floodplain.cost.model_shape import ModelShape, shape_named
from floodplain.files.results import write_result
from floodplain.policy.expansion import LEAST_GAIN

USABLE_BANDWIDTH = 0.85
"""Of a data sheet's memory bandwidth: what large reads reach; assumed."""
USABLE_MEMORY, OTHER_BYTES = 0.92, 3 * GB
"""Of a device's memory, what an engine takes; what of it is neither weights nor KV; assumed."""
DTYPE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU and the link over which its layers would stream, in bytes and bytes per second.

    An H100 of "80 GB" has 81,559 MiB by nvidia-smi; the others are data sheets', and so is the bandwidth of memory.
    ``source`` is that of the link's bandwidth towards the GPU.
    """

    name: str
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    source: str

    @property
    def link_ratio(self) -> float:
        """Rho."""
        return self.link_bandwidth / (USABLE_BANDWIDTH * self.memory_bandwidth)


def _device(name: str, memory_gb: float, memory_tb_s: float, link: str) -> Device:
    profile = LINKS[link]
    _, bandwidth = profile.inbound.points[-1]
    return Device(name, memory_gb * GB, memory_tb_s * 1e12, bandwidth, profile.source)


DEVICES = (
    _device("H100, PCIe 5", 85.5, 3.35, "pcie5"),
    Device("GB200, half of a C2C", 186 * GB, 8e12, 225 * GB, "assumed: one Grace serves two GPUs"),
    _device("H100, NVLink peer", 85.5, 3.35, "nvlink4"),
    _device("GH200, C2C", 96, 4.0, "c2c"),
)


@dataclass(frozen=True, slots=True)
class Model:
    """A model, or one GPU's part of it under tensor parallelism."""

    name: str
    shape: ModelShape
    num_ranks: int = 1

    @property
    def held_bytes(self) -> float:
        """Weights on one GPU."""
        return self.shape.param_bytes(DTYPE_BYTES) / self.num_ranks

    @property
    def read_bytes(self) -> float:
        """Weights that a decode step reads there: all layers and the output projection, not the input embeddings."""
        shape = self.shape
        output = shape.vocab_size * shape.hidden_size * DTYPE_BYTES
        return (shape.num_layers * shape.layer_bytes(DTYPE_BYTES) + output) / self.num_ranks


MODELS = (
    Model("Llama-3.1-8B", shape_named("llama-3.1-8b")),
    Model("Llama-3.1-70B TP8", shape_named("llama-3.1-70b"), 8),
    Model("Llama-3.1-70B TP2", shape_named("llama-3.1-70b"), 2),
    Model("Qwen2.5-14B", shape_named("qwen2.5-14b")),
    Model("OPT-13B", shape_named("opt-13b")),
    Model("OPT-30B", shape_named("opt-30b")),
)
POOLS = ("whole device", "W / 4", "5 GB", "W / 10", "3 GB")


@dataclass(frozen=True, slots=True)
class Cell:
    """One model with one pool on one device."""

    model: Model
    device: Device
    pool: str

    @property
    def pool_bytes(self) -> float:
        """Of the KV pool; above what the device has left, it does not fit."""
        sizes = {
            "W / 4": self.model.read_bytes / 4,
            "W / 10": self.model.read_bytes / 10,
            "5 GB": 5 * GB,
            "3 GB": 3 * GB,
        }
        return sizes.get(self.pool, self.whole_bytes)

    @property
    def whole_bytes(self) -> float:
        """What the device has left for KV."""
        return USABLE_MEMORY * self.device.memory_bytes - self.model.held_bytes - OTHER_BYTES

    @property
    def fits(self) -> bool:
        """Whether the device has so much."""
        return self.pool_bytes <= self.whole_bytes

    @property
    def weights_per_pool(self) -> float:
        """W / a: with rho and the number of layers, all that matters."""
        return self.model.read_bytes / self.pool_bytes

    def compute(self) -> Computed:
        """The closed form."""
        num_layers, ratio = self.model.shape.num_layers, self.device.link_ratio
        places = best_places(num_layers, self.weights_per_pool, 1.0, ratio)
        return Computed(
            best_expansion(self.weights_per_pool, 1.0, ratio),
            places.num_streamed,
            places.expansion,
            expansion_gain(places.expansion, self.weights_per_pool, 1.0),
        )

    def check(self) -> Checked:
        """The loop, with the controller and without streams."""
        return check(self.model.shape.num_layers, self.weights_per_pool, self.device.link_ratio)


@dataclass(frozen=True, slots=True)
class Computed:
    """What the closed form says: e* without slots; with three of them m, e, and the gain."""

    best: float
    num_streamed: int
    expansion: float
    gain: float


Results = dict[Cell, tuple[Computed, Checked]]


def _check(cell: Cell) -> Checked:
    return cell.check()


def compute_all() -> Results:
    """All cells that fit."""
    cells = [cell for cell in (Cell(m, d, p) for m, p, d in product(MODELS, POOLS, DEVICES)) if cell.fits]
    with ProcessPoolExecutor() as workers:
        return {
            cell: (cell.compute(), checked) for cell, checked in zip(cells, workers.map(_check, cells), strict=True)
        }


def table(results: Results) -> Iterator[str]:
    """One row for a model and pool, one column for a device."""
    yield "| model | pool | " + " | ".join(f"{device.name} (rho {device.link_ratio:.3f})" for device in DEVICES) + " |"
    yield "|---" * (2 + len(DEVICES)) + "|"
    for model, pool in product(MODELS, POOLS):
        cells = [Cell(model, device, pool) for device in DEVICES]
        yield f"| {model.name} | {pool} | " + " | ".join(_entry(cell, results) for cell in cells) + " |"


def _entry(cell: Cell, results: Results) -> str:
    if cell not in results:
        return "does not fit"
    computed, checked = results[cell]
    size = f"{cell.pool_bytes / GB:.0f} GB: " if cell.pool == "whole device" else ""
    difference = checked.gain / computed.gain - 1
    return (
        f"{size}{computed.best:.2f}, {computed.expansion:.2f} ({computed.num_streamed}), **{computed.gain:.2f}**; "
        f"{checked.expansion:.2f}, {checked.gain:.2f}, {difference:+.0%}"
    )


def thresholds() -> Iterator[str]:
    """For each link, the largest pools that gain something, as parts of the weights."""
    yield "| link | rho | gains 2 % up to a pool of | 10 % | 50 % | 100 % |"
    yield "|---|---|---|---|---|---|"
    for device in DEVICES:
        parts = [_largest_pool(device.link_ratio, gain) for gain in (LEAST_GAIN, 1.1, 1.5, 2.0)]
        texts = [f"{part:.2f} W" if part >= 0.1 else f"{part:.3f} W" for part in parts]
        yield f"| {device.name} | {device.link_ratio:.3f} | " + " | ".join(texts) + " |"


def _largest_pool(link_ratio: float, gain: float) -> float:
    """a / W at which the closed form without slots gains so much: by bisection, since smaller pools gain more."""
    low, high = 1e-4, 1e4
    for _ in range(60):
        middle = (low * high) ** 0.5
        is_enough = expansion_gain(best_expansion(1.0, middle, link_ratio), 1.0, middle) >= gain
        low, high = (middle, high) if is_enough else (low, middle)
    return low


def sentences(results: Results) -> Iterator[str]:
    """What the table says in words."""
    for device in DEVICES:
        parts = []
        for pool in POOLS:
            gains = {
                cell.model.name: computed.gain
                for cell, (computed, _) in results.items()
                if (cell.device, cell.pool) == (device, pool)
            }
            num_paying = sum(gain >= LEAST_GAIN for gain in gains.values())
            best = max(gains, key=lambda name: gains[name])
            parts.append(f"{pool} {num_paying} of {len(gains)}, at most {gains[best]:.2f} ({best})")
        yield f"- {device.name}, models that gain {LEAST_GAIN - 1:.0%} or more: {'; '.join(parts)}."
    differences = sorted(checked.gain / computed.gain - 1 for computed, checked in results.values())
    least, median, most = differences[0], differences[len(differences) // 2], differences[-1]
    stall_share = max(checked.stall_share for _, checked in results.values())
    worst = min(checked.gain for _, checked in results.values())
    yield (
        f"- The loop against the closed form, {len(differences)} cells: from {least:+.0%} to {most:+.0%}, median "
        f"{median:+.1%}; stalls at most {stall_share:.1%}; tokens per second nowhere below {worst:.2f} of those "
        "without streams."
    )


def report(results: Results) -> str:
    """All of it as Markdown."""
    links = "; ".join(f"{device.name} {device.link_bandwidth / GB:.0f} GB/s ({device.source})" for device in DEVICES)
    head = (
        f"Links: {links}. Memory bandwidth: {USABLE_BANDWIDTH:.0%} of the data sheet's. Whole device: "
        f"{USABLE_MEMORY:.0%} of its memory without weights and {OTHER_BYTES / GB:.0f} GB. bfloat16; W is what a step "
        "reads of the weights."
    )
    legend = (
        "A cell: e* of the closed form; e with whole layers and three slots (layers that stream), **gain** in tokens "
        "per second under unlimited load; then what the controller reached in the engine's loop in virtual time: e, "
        "gain, and its difference to the closed form."
    )
    return "\n".join([head, "", *thresholds(), "", legend, "", *table(results), "", *sentences(results)]) + "\n"


def main() -> None:
    """Compute, print, and write if told where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for formula.md and formula.png")
    args = parser.parse_args()
    results = compute_all()
    text = report(results)
    print(text, end="")
    if args.out is not None:
        from benchmarks.expansion.formula_chart import draw

        write_result(args.out / "formula.md", text)
        draw(results, DEVICES, args.out / "formula.png")


if __name__ == "__main__":
    main()
