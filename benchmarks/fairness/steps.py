"""What the steps of a run cost: least squares over all of them."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np

from floodplain.core.plan import StepPlan, StepResult
from floodplain.engine.shell import Engine
from floodplain.sim.executor import StepLine

STEP = StepLine(base_s=0.0132, decode_s=0.00064, prefill_token_s=0.0005)
"""A step of this model on two cores, as in ``benchmarks/policies``: what ``slowness`` is relative to."""

LINE = ("base_s", "decode_s", "prefill_token_s", "copies_s", "transfer_s", "block_s")
"""Of any step; for each decode and prompt token in it; of one beside which anything is copied; for each transfer and
each block of it that begin with it. The last three are what comes with copies, not what copying takes: the batch of
such a step is new, too."""


class StepLog:
    """Every step of an engine from now on.

    Args:
        engine: Its executor is timed. Steps that only move KV are not counted: nobody waits for them.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._durations_s: list[float] = []
        self._work: list[tuple[int, ...]] = []
        executor: Any = engine._executor
        self._execute, executor.execute = executor.execute, self._timed

    @property
    def slowness(self) -> tuple[float, int]:
        """(the median duration of plain steps, which decode with no copy beside them, as a part of what ``STEP`` says;
        how many there were). They are the same work whatever the policy: how they differ, the machine differs."""
        ratios = [
            duration_s / (STEP.base_s + STEP.decode_s * work[1])
            for duration_s, work in zip(self._durations_s, self._work, strict=True)
            if not any(work[2:])
        ]
        return median(ratios), len(ratios)

    def costs(self) -> dict[str, float]:
        """Each part of ``LINE``; how many steps, decodes and prompt tokens there were; seconds of all steps; and
        ``residual_s``, the standard deviation of what the line leaves unexplained of a step."""
        work, durations_s = np.array(self._work, dtype=float), np.array(self._durations_s)
        line = np.linalg.lstsq(work, durations_s, rcond=None)[0]
        num_steps, num_decodes, num_prompt, *_ = work.sum(axis=0).tolist()
        return {
            **dict(zip(LINE, line.tolist(), strict=True)),
            "num_steps": num_steps,
            "num_decodes": num_decodes,
            "num_prompt_tokens": num_prompt,
            "all_s": float(durations_s.sum()),
            "residual_s": float((durations_s - work @ line).std()),
        }

    def _timed(self, plan: StepPlan) -> StepResult:
        num_decodes, num_prefill = plan.count_work()
        num_blocks = sum(len(transfer.blocks) for transfer in plan.transfers)
        is_copying = bool(plan.transfers or self._engine._num_copying)
        begin = time.perf_counter()
        result: StepResult = self._execute(plan)
        if num_decodes or num_prefill:
            self._durations_s.append(time.perf_counter() - begin)
            self._work.append((1, num_decodes, num_prefill, int(is_copying), len(plan.transfers), num_blocks))
        return result
