"""Fits the parts of ``cost.step_time.StepCost`` to sums of kernels by NVIDIA's tables, for ``cost/fits.py``.

    python benchmarks/sim_vs_real/fit_kernels.py FOLDER GPU DEVICE MODEL NUM_GPUS MOST_DECODES

``FOLDER`` has rows of the PyPI package aiconfigurator-core 0.12.0 (Apache-2.0): ``aic_gemm_bf16.csv`` (gpu, m, n, k,
lat_us), ``aic_attention_prefill.csv`` and ``aic_attention_decode.csv`` (gpu, q_heads, kv_heads, batch_size, lat_us, and
prompt_len or kv_len). ``GPU`` is one of theirs; ``DEVICE``, one of ``cost.devices``, has the time of sums over GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random

import numpy as np

from floodplain.cost.devices import Device, device_named
from floodplain.cost.fit import StepRow, fit_steps
from floodplain.cost.model_shape import ModelShape, shape_named
from floodplain.cost.step_time import PARTS, StepWork
from floodplain.workload.columns import read_csv

NUM_STEPS, BUDGET, LONGEST, SEED = 800, 2048, 12_000, 1
OTHER_KERNELS = 1.06
"""Norms, rotary positions, activations and additions beside matrices: 6 % in Vidur's tables of Llama-2-70B on A100."""
Points = dict[tuple[float, ...], float]


def read_points(path: Path, gpu: str, axes: Sequence[str], **only: int) -> Points:
    """Seconds by the values of ``axes``."""
    _, rows = read_csv(path)
    chosen = (
        row for _, row in rows if row["gpu"] == gpu and all(int(row[key]) == value for key, value in only.items())
    )
    return {tuple(float(row[axis]) for axis in axes): float(row["lat_us"]) * 1e-6 for row in chosen}


def between(points: Points, place: Sequence[float]) -> float:
    """The value at a place, between measured points linear in each axis; the last line continues."""
    if not place:
        return points[()]
    firsts = sorted({point[0] for point in points})
    if len(place) > 1:
        firsts = [first for first in firsts if sum(point[0] == first for point in points) > 1]
    low = min(max(int(np.searchsorted(firsts, place[0], side="right")) - 1, 0), len(firsts) - 2)
    values = [
        between({point[1:]: value for point, value in points.items() if point[0] == first}, place[1:])
        for first in firsts[low : low + 2]
    ]
    return values[0] + (values[1] - values[0]) * (place[0] - firsts[low]) / (firsts[low + 1] - firsts[low])


class Kernels:
    """The time of a batch: matrices by tokens, attention by chunk or decodes, and sums over the GPUs."""

    def __init__(self, folder: Path, gpu: str, device: Device, shape: ModelShape, num_gpus: int) -> None:
        self._shape, self._device, self._num_gpus = shape, device, num_gpus
        heads = {"q_heads": shape.num_heads // num_gpus, "kv_heads": shape.num_kv_heads // num_gpus}
        gemm = read_points(folder / "aic_gemm_bf16.csv", gpu, ("m", "n", "k"))
        prompts = read_points(folder / "aic_attention_prefill.csv", gpu, ("prompt_len",), batch_size=1, **heads)
        self._prompts = {length: value for (length,), value in prompts.items()}
        self._decodes = read_points(folder / "aic_attention_decode.csv", gpu, ("batch_size", "kv_len"), **heads)
        hidden, ffn = shape.hidden_size, shape.ffn_size // num_gpus
        sizes = [((shape.q_size + 2 * shape.kv_size) // num_gpus, hidden), (hidden, shape.q_size // num_gpus)]
        sizes += [(2 * ffn, hidden), (hidden, ffn)]
        tokens = sorted({m for m, _, _ in gemm})
        self._layer = [sum(between(gemm, (m, *size)) for size in sizes) for m in tokens]
        self._head = [between(gemm, (m, shape.vocab_size // num_gpus, hidden)) for m in tokens]
        self._tokens = tokens

    def batch_s(self, contexts: Sequence[int], chunks: Sequence[tuple[int, int]]) -> float:
        """As ``step_time.BatchCost``; each sequence is sampled."""
        shape, num_tokens = self._shape, len(contexts) + sum(tokens for _, tokens in chunks)
        layer_s = OTHER_KERNELS * float(np.interp(num_tokens, self._tokens, self._layer))
        layer_s += 2 * self._device.all_reduce.time_s(2 * num_tokens * shape.hidden_size, self._num_gpus)
        layer_s += sum(self._prompt_s(before + tokens) - self._prompt_s(before) for before, tokens in chunks)
        if contexts:
            layer_s += between(self._decodes, (len(contexts), sum(contexts) / len(contexts)))
        return shape.num_layers * layer_s + float(np.interp(len(contexts) + len(chunks), self._tokens, self._head))

    def _prompt_s(self, tokens: int) -> float:
        lengths = sorted(self._prompts)
        return float(np.interp(tokens, [0, *lengths], [0.0, *(self._prompts[length] for length in lengths)]))


def draw_batch(dice: Random, most_decodes: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Contexts and chunks of a random step."""
    contexts = [dice.randint(200, LONGEST) for _ in range(dice.choice((0, dice.randint(1, most_decodes))))]
    chunks, left = list[tuple[int, int]](), BUDGET - len(contexts)
    for _ in range(dice.choice((1, 1, 2)) if not contexts or dice.random() < 0.5 else 0):
        tokens = min(left, int(2 ** dice.uniform(6, 11)))
        chunks.append((dice.choice((0, dice.randint(1, LONGEST - tokens))), tokens))
        left -= tokens
        if left < 64:
            break
    return contexts, chunks


def main(folder: str, gpu: str, device: str, model: str, num_gpus: str, most_decodes: str) -> None:
    """Print the fit and its errors."""
    kernels = Kernels(Path(folder), gpu, device_named(device), shape_named(model), int(num_gpus))
    dice, rows = Random(SEED), []
    for _ in range(NUM_STEPS):
        contexts, chunks = draw_batch(dice, int(most_decodes))
        rows.append(StepRow(StepWork.of(contexts, chunks), kernels.batch_s(contexts, chunks)))
    fit = fit_steps(rows, [part for part in PARTS if part != "chunk_s"])
    print({name: float(f"{value:.4g}") for name, value in asdict(fit.cost).items()})
    print(f"median error {fit.median_error:.3f}, p95 {fit.p95_error:.3f}, {fit.num_outliers} outliers")


if __name__ == "__main__":
    main(*sys.argv[1:])
