"""Profiles an engine's steps: measures them, fits the parts of their time, and states the errors of the fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import torch

from floodplain.core.errors import UserError
from floodplain.cost.fit import StepFit, fit_steps
from floodplain.cost.step_time import LINE_PARTS, StepCost
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.files.profile import Profile
from floodplain.memory.backend_choice import choose_backend
from floodplain.profiler.step_grid import draw_shapes
from floodplain.profiler.step_recorder import RecordedStep, StepRecorder, limits_of, record_rows

_NUM_WARM_UP = 8
"""Steps that are run and not measured: the first use compiles kernels and fills caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGrid:
    """How many steps are measured.

    Attributes:
        num_shapes: Of different sizes.
        num_repeats: The most measurements of each.
        limit_s: Seconds after which no more are measured.

    Raises:
        UserError: A value is out of its range.
    """

    num_shapes: int = 64
    num_repeats: int = 5
    limit_s: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.num_shapes <= 10_000:
            raise UserError(f"--shapes must be between 1 and 10000, not {self.num_shapes}")
        if not 1 <= self.num_repeats <= 1000:
            raise UserError(f"--repeats must be between 1 and 1000, not {self.num_repeats}")
        if not 0 < self.limit_s <= 86400:
            raise UserError(f"--step-seconds must be above 0 and at most 86400, not {self.limit_s}")


def profile_steps(config: EngineConfig, grid: StepGrid, on_step: Callable[[], object] = lambda: None) -> Profile:
    """Build the engine, measure its steps, and fit them.

    Args:
        config: The engine's flags.
        grid: How many steps.
        on_step: Called after each.

    Raises:
        UserError: The engine cannot be built, or the steps that were measured say too little.
    """
    rng = Random(config.seed)
    engine = build_engine(config)
    try:
        shapes = draw_shapes(limits_of(engine), grid.num_shapes, rng)
        recorder = StepRecorder(engine, rng)
        for shape in shapes[:_NUM_WARM_UP]:
            recorder.measure(shape)
        steps = record_rows(
            recorder, shapes, num_repeats=grid.num_repeats, limit_s=grid.limit_s, rng=rng, on_step=on_step
        )
    finally:
        engine.close()
    return make_profile(config, grid, steps)


def make_profile(config: EngineConfig, grid: StepGrid, steps: Sequence[RecordedStep]) -> Profile:
    """Return the profile of steps that were measured on an engine with this configuration.

    Raises:
        UserError: The steps leave a part of their time undetermined.
    """
    rows = [step.row for step in steps]
    fit, line = fit_steps(rows, seed=config.seed), fit_steps(rows, LINE_PARTS, seed=config.seed)
    return Profile(
        kind="step",
        subject=config.model,
        machine=choose_backend(torch.device(config.device)).describe(),
        settings={**asdict(config), **asdict(grid)},
        result={name: getattr(line.cost, name) for name in LINE_PARTS} | {"parts": asdict(fit.cost)},
        tries=[_try(step, fit.cost) for step in steps],
        errors=_errors(fit) | {f"line_{name}": value for name, value in _errors(line).items()},
    )


def _errors(fit: StepFit) -> dict[str, float]:
    return {"median": fit.median_error, "p95": fit.p95_error, "num_outliers": fit.num_outliers}


def _try(step: RecordedStep, cost: StepCost) -> dict[str, Any]:
    return {
        **asdict(step.shape.work),
        "times": step.num_times,
        "step_s": step.seconds,
        "fitted_s": cost.time_s(step.shape.work),
    }
