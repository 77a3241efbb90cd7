"""Pie's figure 10: Pie beside FlexGen, which keeps weights in host memory and serves padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from floodplain.cost.devices import Roofline, device_named
from floodplain.cost.link import GB, LINKS
from floodplain.cost.model_shape import shape_named
from floodplain.papers.claims import Figure, Measured, Picture, Statement, Unknown
from floodplain.papers.pie_serving import ALPACA, COMMON, OWN, SHAREGPT, Case
from floodplain.workload.traces import TraceRow

MODEL, POOL_GB = "opt-30b", 3.0
CLOSED_FORM = "a closed form of FlexGen"
LOAD = 0.8
"""Request rate where latencies are compared, as a part of what Pie completes."""


@dataclass(frozen=True, slots=True)
class FlexGen:
    """FlexGen with a part of the weights in host memory, and all KV on the GPU.

    Every step copies that part to the GPU, and compute waits for it. The memory that it frees holds KV. Requests are
    served in batches, padded to one length of prompts and one of outputs.

    Attributes:
        host_share: Part of the weights in host memory.
        pool_bytes: KV memory beside all weights; grows by the weights that are in host memory.
        prompt_tokens, output_tokens: The lengths to which requests are padded.
    """

    host_share: float
    pool_bytes: float
    prompt_tokens: int
    output_tokens: int

    @property
    def batch_size(self) -> int:
        """Requests of a batch: as many as fit, and at least one."""
        shape = shape_named(MODEL)
        request_bytes = (self.prompt_tokens + self.output_tokens) * shape.kv_bytes_per_token()
        return max(1, int((self.pool_bytes + self.host_share * shape.param_bytes()) // request_bytes))

    @property
    def batch_s(self) -> float:
        """Seconds of a batch: the prompts, and each output token but the first at the mean context."""
        shape, size = shape_named(MODEL), self.batch_size
        compute = Roofline(shape, device_named("gh200-96gb"))
        copies_s = self.host_share * shape.param_bytes() / LINKS["c2c"].inbound.peak_bandwidth
        prompts_s = compute.batch_s([], [(0, self.prompt_tokens)] * size, size)
        step_s = compute.batch_s([self.prompt_tokens + self.output_tokens // 2] * size, [], size)
        return prompts_s + copies_s + (self.output_tokens - 1) * (step_s + copies_s)

    def serve(self, arrivals_s: Sequence[float]) -> list[float]:
        """The time when each request ends: a batch takes what has arrived, as soon as the one before it has ended."""
        ends_s: list[float] = []
        free_s = 0.0
        while len(ends_s) < len(arrivals_s):
            start_s = max(free_s, arrivals_s[len(ends_s)])
            waiting = sum(arrival_s <= start_s for arrival_s in arrivals_s[len(ends_s) :])
            free_s = start_s + self.batch_s
            ends_s += [free_s] * min(waiting, self.batch_size)
        return ends_s


@dataclass(frozen=True, slots=True)
class Guess:
    """The part of the weights in host memory, and whether requests are padded to the longest or cut to the mean."""

    host_share: float
    is_longest: bool = True

    def flexgen(self, rows: Sequence[TraceRow]) -> FlexGen:
        """FlexGen for these requests, beside all weights and Pie's KV pool."""
        prompts, outputs = [row.prompt_tokens for row in rows], [row.output_tokens for row in rows]
        lengths = (max(prompts), max(outputs)) if self.is_longest else (round(fmean(prompts)), round(fmean(outputs)))
        return FlexGen(self.host_share, POOL_GB * GB, *lengths)


def _measure(guess: Guess, seed: int) -> Measured:
    quantities = dict[str, float]()
    speeds: dict[str, list[float]] = {"FlexGen": [], "Pie": []}
    for dataset in (ALPACA, replace(SHAREGPT, num_requests=96)):
        case, rows = Case(MODEL, dataset, POOL_GB), dataset.rows(float("inf"), seed)
        flexgen, tokens = guess.flexgen(rows), sum(row.output_tokens for row in rows)
        slow = tokens / flexgen.serve([0.0] * len(rows))[-1]
        fast = case.tokens_per_s("auto", seed)
        rate = LOAD * fast / tokens * len(rows)
        arrivals_s = [row.arrival_s for row in dataset.rows(rate, seed)]
        waited_s = sum(flexgen.serve(arrivals_s)) - sum(arrivals_s)
        name = dataset.name.lower()
        quantities |= {
            name: fast / slow,
            f"{name}_own": case.own_tokens_per_s(seed) / slow,
            f"{name}_latency": waited_s / sum(case.serve("auto", seed, rate).e2e_s),
        }
        speeds["FlexGen"].append(slow)
        speeds["Pie"].append(fast)
    names = ("Alpaca", "ShareGPT")
    bars = {system: (names, values) for system, values in speeds.items()}
    return Measured(quantities, Picture("", {"tokens/s": bars}))


FIGURE_10 = Figure(
    name="pie-10",
    shows="Pie and FlexGen: throughput and latency",
    setting="OPT-30B on one GH200, Alpaca and ShareGPT",
    statements=(
        Statement("ShareGPT: Pie's tokens/s over FlexGen's", 9.4, "sharegpt", own="sharegpt_own", assumed=CLOSED_FORM),
        Statement("Alpaca: Pie's tokens/s over FlexGen's", 7.8, "alpaca", own="alpaca_own", assumed=CLOSED_FORM),
        Statement("FlexGen's latency over Pie's (up to 60x), ShareGPT", 60.0, "sharegpt_latency", assumed=CLOSED_FORM),
    ),
    assumptions=(
        "FlexGen's placement is not in the paper: a part of the weights is in host memory, all KV is on the GPU, and "
        "compute waits for copies (a closed form, not its code).",
        "FlexGen's batches are padded to the longest prompt and output of the requests drawn, as the paper says, or "
        "have the mean lengths; requests are then cut or padded, so that the tokens are as many.",
        f"The GPU has memory for all weights and {POOL_GB:g} GB of KV; Pie's expansion is our controller's.",
        f"Latencies are compared at {LOAD:g} of the requests per second that Pie completes.",
        *COMMON,
        OWN,
    ),
    measure=_measure,
    unknown=Unknown(
        "weights in host memory and padding",
        {f"{share:.0%}, to the longest": Guess(share) for share in (0.25, 0.5, 1.0)}
        | {f"{share:.0%}, to the mean": Guess(share, is_longest=False) for share in (0.25, 0.5, 1.0)},
        "50%, to the longest",
    ),
)
