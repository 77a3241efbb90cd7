"""Fits the parts of ``cost.step_time.StepCost`` to steps that tables of kernels price, for ``cost/fits.py``.

    python benchmarks/sim_vs_real/fit.py TABLES_FOLDER MODEL MOST_DECODES

``TABLES_FOLDER`` is as for ``cost.kernels`` of a scenario; a step has at most ``MOST_DECODES`` decodes, which should be
what the KV pool holds.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from random import Random

from floodplain.cost.fit import StepRow, fit_steps
from floodplain.cost.model_shape import shape_named
from floodplain.cost.step_time import StepWork
from floodplain.sim.cost_files import read_kernels

NUM_STEPS, BUDGET, SEED = 1500, 2048, 1
LONGEST = 2500
"""Tokens of the longest context; the grids end at 16,384, and chat rarely reaches this."""


def draw_batch(dice: Random, max_num_seqs: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Contexts and chunks of a random step."""
    num_decodes = dice.choice([n for n in (0, 1, 4, 8, 16, 24, 32, 40, 48, 64, 96, 128) if n <= max_num_seqs])
    contexts = [dice.randint(50, LONGEST) for _ in range(num_decodes)]
    chunks, left = list[tuple[int, int]](), BUDGET - num_decodes
    if dice.random() < 0.5 or not num_decodes:
        for _ in range(dice.choice((1, 1, 2, 3))):
            tokens = min(left, int(2 ** dice.uniform(4, 11)))
            if tokens >= 16:
                chunks.append((dice.choice((0, 0, 0, dice.randint(16, 2000))), tokens))
                left -= tokens
    return contexts, chunks


def main(folder: str, model: str, max_num_seqs: str) -> None:
    """Print the fit and its errors."""
    cost, dice, rows = read_kernels(Path(folder), shape_named(model), {}, 0.0, int(max_num_seqs)), Random(SEED), []
    while len(rows) < NUM_STEPS:
        contexts, chunks = draw_batch(dice, int(max_num_seqs))
        if contexts or chunks:
            seconds = cost.batch_s(contexts, chunks, len(contexts) + len(chunks))
            rows.append(StepRow(StepWork.of(contexts, chunks), seconds))
    fit = fit_steps(rows)
    print({name: float(f"{value:.4g}") for name, value in asdict(fit.cost).items()})
    print(f"median error {fit.median_error:.3f}, p95 {fit.p95_error:.3f}, {fit.num_outliers} outliers")


if __name__ == "__main__":
    main(*sys.argv[1:])
