"""Costs of steps that ship: parts fitted to measured kernels, by device, model and tensor parallelism.

Yi-34B and Llama-2-70B are derived by ``benchmarks/swap_space/steps.py``; Qwen2.5 on A800 and H800 by
``benchmarks/sim_vs_real/fit_kernels.py``. The others are from the kernel tables of LLMServingSim's repository
(casys-kaist/LLMServingSim, commit 5daddb2, MIT licence; vLLM 0.19), priced by ``cost.kernels``:
``python benchmarks/sim_vs_real/fit.py TABLES MODEL DECODES``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from floodplain.cost.step_time import StepCost


@dataclass(frozen=True, slots=True)
class ShippedFit:
    """A fitted cost, its source, and the median relative error of a step that it was not fitted to."""

    cost: StepCost
    source: str
    median_error: float

    def with_overhead(self, overhead_s: float) -> StepCost:
        """The cost with ``overhead_s`` more in each step."""
        return replace(self.cost, base_s=self.cost.base_s + overhead_s)


def _fit(median_error: float, tables: str, **parts: float) -> ShippedFit:
    return ShippedFit(StepCost(**parts), f"fit to kernels measured by LLMServingSim's authors ({tables})", median_error)


def _fit_of_2023(median_error: float, **parts: float) -> ShippedFit:
    source = "fit to steps of vLLM in 2023 (splitwise-sim) beside attention kernels (aiconfigurator-core)"
    return ShippedFit(StepCost(**parts), source, median_error)


_FITS = {
    ("rtx4090", "llama-3.1-8b", 1): _fit(
        0.034, "RTX 4090, at most 48 decodes",
        base_s=0.01615, decode_s=7.781e-05, context_token_s=1.644e-07, prefill_token_s=6.815e-05,
        self_pair_s=2.894e-08, prefix_token_s=1.386e-07, prefix_pair_s=4.348e-09,
    ),
    ("rtxpro6000", "llama-3.1-8b", 1): _fit(
        0.031, "RTX PRO 6000, at most 128 decodes",
        base_s=0.01076, decode_s=3.331e-05, context_token_s=9.537e-08, prefill_token_s=2.899e-05,
        self_pair_s=1.028e-08, prefix_token_s=5.118e-07, prefix_pair_s=1.655e-09,
    ),
    ("rtxpro6000", "qwen3-32b", 1): _fit(
        0.045, "RTX PRO 6000, at most 128 decodes",
        base_s=0.04402, decode_s=0.00015, context_token_s=1.858e-07, chunk_s=0.001274, prefill_token_s=0.0001349,
        self_pair_s=3.64e-08, prefix_token_s=2.061e-06, prefix_pair_s=7.012e-09,
    ),
    ("a800-80gb", "qwen2.5-14b", 1): ShippedFit(
        StepCost(
            base_s=0.01789, decode_s=8.768e-05, context_token_s=1.331e-07, prefill_token_s=8.321e-05,
            self_pair_s=2.228e-08, prefix_pair_s=5.242e-09,
        ),
        "fit to sums of kernels that aiconfigurator-core measured on an A100",
        0.035,
    ),
    ("h800-80gb", "qwen2.5-72b", 4): ShippedFit(
        StepCost(
            base_s=0.01571, decode_s=4.244e-05, context_token_s=2.991e-08, prefill_token_s=3.785e-05,
            self_pair_s=2.988e-08, prefix_pair_s=5.492e-10,
        ),
        "fit to sums of kernels that aiconfigurator-core measured on an H100, and to assumed sums over GPUs",
        0.036,
    ),
    ("a100-80gb", "yi-34b-200k", 1): ShippedFit(
        StepCost(
            base_s=0.05654, decode_s=0.0001761, context_token_s=1.672e-07, prefill_token_s=0.0003255,
            self_pair_s=9.256e-09, prefix_token_s=1.672e-07, prefix_pair_s=9.256e-09,
        ),
        "derived from steps of Llama-2-70B on two A100 (splitwise-sim) and attention kernels (aiconfigurator-core)",
        0.071,
    ),
    ("a100-80gb", "llama-2-70b", 2): _fit_of_2023(
        0.071, base_s=0.05654, decode_s=0.0001761, context_token_s=1.183e-07, prefill_token_s=0.0003255,
        self_pair_s=7.221e-09, prefix_token_s=1.183e-07, prefix_pair_s=7.221e-09,
    ),
    ("h100-80gb", "llama-2-70b", 2): _fit_of_2023(
        0.019, base_s=0.0371, decode_s=0.0001165, context_token_s=5.41e-08, prefill_token_s=0.0001315,
        self_pair_s=1.94e-09, prefix_token_s=5.41e-08, prefix_pair_s=1.94e-09,
    ),
}  # fmt: skip


def fit_of(device: str, model: str, num_shards: int) -> ShippedFit | None:
    """The fit for a device, a model and a number of GPUs that share it; None if none ships."""
    return _FITS.get((device, model, num_shards))
