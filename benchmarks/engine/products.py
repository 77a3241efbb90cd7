"""Products of bfloat16 weights with few and many rows: by torch, and as the engine multiplies.

``.venv/bin/python benchmarks/engine/products.py`` prints a table and writes ``products.json``.
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from floodplain.bench.offline import hardware_report
from floodplain.model.network.linear import Linear, PackedLinear, fast_dtype
from floodplain.observe.strict_json import save_result

SHAPES = [(576, 1536), (2048, 8192), (576, 49152)]
"""Weights (in, out): an MLP of SmolLM2-135M, one of a model of 1.7B parameters, and the head of the former."""
ROWS = [1, 4, 8, 9, 16, 64, 512]
ROUNDS = 5


def measure(num_in: int, num_out: int, num_rows: int) -> dict[str, float]:
    """Median milliseconds of each way, in turns."""
    weight, x = torch.randn(num_out, num_in).bfloat16(), torch.randn(num_rows, num_in).bfloat16()
    linear, packed = Linear(weight), PackedLinear(weight)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "torch": lambda: F.linear(x, weight),
        "in place": lambda: linear(x),
        "packed": lambda: packed(x),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, way in ways.items():
            times[name].append(1e3 * timeit.timeit(way, number=3) / 3)
    return {name: round(statistics.median(found[1:]), 3) for name, found in times.items()}


def main() -> None:
    """Measure, print, save."""
    torch.manual_seed(0)
    cases = [(shape, rows) for shape in SHAPES for rows in ROWS if shape[1] * rows < 2**24]
    found = [{"in": i, "out": o, "rows": rows, "ms": measure(i, o, rows)} for (i, o), rows in cases]
    result = {
        "processor": hardware_report("cpu").name,
        "torch_threads": torch.get_num_threads(),
        "multiplied_in": str(fast_dtype(torch.bfloat16, torch.device("cpu"))),
        "rounds": ROUNDS,
        "products": found,
    }
    save_result(Path(__file__).with_name("products.json"), result)
    print("| weights | rows | torch (ms) | in place (ms) | packed (ms) |\n|---|---|---|---|---|")
    for row in found:
        cells = " | ".join(f"{number:.3g}" for number in row["ms"].values())  # type: ignore[attr-defined]
        print(f"| {row['in']} x {row['out']} | {row['rows']} | {cells} |")


if __name__ == "__main__":
    main()
