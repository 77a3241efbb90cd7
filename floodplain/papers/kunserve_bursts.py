"""KunServe's bursts: replicas that run out of KV memory, beside ways to handle it; the set-up of several figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from floodplain.papers.claims import Unknown
from floodplain.papers.serving import Lengths, Served, rows_of, scenario_of, serve_rows
from floodplain.sim.machine import resolve_machine
from floodplain.workload.arrivals import Phase, phase_arrivals
from floodplain.workload.traces import TraceRow

VLLM, PIPELINE, SWAP, KUNSERVE, OWN = "vLLM", "vLLM (PP)", "InferCept", "KunServe", "Floodplain"
BLOCK_TOKENS, CHUNK_TOKENS, NUM_DRAWN = 64, 2048, 4000
"""Of a KV block, as in the paper's set-up; of a chunk of a prompt; lengths that are drawn for a mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model on equal instances, and the load.

    Attributes:
        place: Model, device and GPUs of an instance, as in a scenario.
        link: Between instances, bytes per second for each GPU, each way.
        phases: (seconds, rate relative to the load before the burst) of each part; arrivals are Poisson in each.
    """

    place: Mapping[str, Any]
    num_instances: int
    link: float
    lengths: Lengths
    phases: tuple[tuple[float, float], ...] = ()

    def scenario(self, **others: Any) -> dict[str, Any]:
        """The scenario of a way: ``others`` replace its keys."""
        engine = {
            "policy": "fcfs", "block_tokens": BLOCK_TOKENS, "max_num_seqs": 1024, "prefix_cache": False,
            "scheduling": "sync", "max_batched_tokens": CHUNK_TOKENS,
        }  # fmt: skip
        return dict(self.place) | {"instances": self.num_instances, "engine": engine} | others

    def ways(self) -> dict[str, dict[str, Any]]:
        """Scenarios by the name of the way."""
        swap, own = {"memory": "160GB", "link": "pcie4"}, self.scenario()["engine"] | {"policy": "timely"}
        is_cluster = self.num_instances > 1
        return {
            VLLM: self.scenario(),
            PIPELINE: self.scenario(relief=self.relief(mode="pipeline", most_stages=2, split="tokens")),
            SWAP: self.scenario(swap=swap),
            KUNSERVE: self.scenario(relief=self.relief(split="halving")),
            OWN: self.scenario(engine=own, swap=swap, relief=self.relief(mode="auto") if is_cluster else None),
        }

    def relief(self, **others: Any) -> dict[str, Any]:
        """Drops as KunServe has them: ``others`` replace keys."""
        return {"mode": "drop", "link": self.link, "microbatch_tokens": 1024} | others

    def rate(self, share: float) -> float:
        """``share`` of the requests per second that fill the KV memory in the mean, by a closed form.

        Prompts of mean length take part of an instance's time, and slow down as many decodes as its memory holds.
        """
        machine = resolve_machine(scenario_of(self.scenario()))
        pairs = self.lengths.draw(NUM_DRAWN, np.random.default_rng(0))
        prompt, output = (round(fmean(each)) for each in zip(*pairs, strict=True))
        held = prompt + output // 2
        count = machine.num_blocks * BLOCK_TOKENS // held
        step_s = machine.cost.batch_s([held] * count, [], count)
        chunks = [(before, min(CHUNK_TOKENS, prompt - before)) for before in range(0, prompt, CHUNK_TOKENS)]
        prompt_s = sum(machine.cost.batch_s([], [chunk], 1) for chunk in chunks)
        return share * self.num_instances * count / (output * step_s + count * prompt_s)

    def rows(self, rate: float, seed: int) -> list[TraceRow]:
        """The requests, with ``rate`` before the burst."""
        rng = np.random.default_rng(seed)
        phases = [Phase(seconds, factor * rate) for seconds, factor in self.phases]
        count = round(sum(phase.duration_s * phase.rate for phase in phases))
        times = phase_arrivals(phases, count, 1.0, rng)
        return rows_of(times, self.lengths.draw(count, rng))

    def serve(self, names: Iterable[str], share: float, seed: int) -> tuple[list[TraceRow], dict[str, Served]]:
        """Serve one load under several ways; returns the load, too."""
        rows, ways = self.rows(self.rate(share), seed), self.ways()
        return rows, {name: serve_rows(ways[name], rows) for name in names}


def late_share(ttft_s: Sequence[float], limit_s: float) -> float:
    """Per cent of the requests whose TTFT is above a limit."""
    return 100 * sum(one > limit_s for one in ttft_s) / len(ttft_s)


def pools_over_demand(served: Served) -> float:
    """KV blocks of all pools over those that requests hold in the mean over time."""
    timeline = served.result["floodplain"]["timeline"]
    return float(np.mean(timeline["kv_total_blocks"]) / np.mean(timeline["kv_used_blocks"]))


def over_time(
    rows: Sequence[TraceRow], served: Mapping[str, Served], window_s: float = 10.0
) -> dict[str, tuple[list[float], list[float]]]:
    """Mean TTFT of the requests that arrive in each window, by way."""
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for name, one in served.items():
        windows: dict[int, list[float]] = {}
        for row, ttft_s in zip(rows, one.ttft_s, strict=True):
            windows.setdefault(int(row.arrival_s // window_s), []).append(ttft_s)
        curves[name] = [window_s * place for place in windows], [fmean(each) for each in windows.values()]
    return curves


A800 = {"model": "qwen2.5-14b", "device": "a800-80gb"}
H800 = {"model": "qwen2.5-72b", "device": "h800-80gb", "tensor_parallel": 4}
LONGBENCH = Lengths((5200.0, 10200.0), (470.0, 750.0), 16384)
BURSTGPT = Lengths((385.0, 1440.0), (157.0, 588.0), 8192)
LONGBENCH_14B = Setting(place=A800, num_instances=2, link=25e9, lengths=LONGBENCH)
BURSTGPT_14B = replace(LONGBENCH_14B, lengths=BURSTGPT, num_instances=1)
LONGBENCH_72B = replace(LONGBENCH_14B, place=H800, link=50e9)


@dataclass(frozen=True, slots=True)
class Load:
    """The load before a burst, as a part of the rate that fills the KV memory, and the seconds of its doubled rate."""

    share: float
    burst_s: float

    def of(self, setting: Setting) -> Setting:
        """The setting with this burst."""
        return replace(setting, phases=((45.0, 1.0), (self.burst_s, 2.0), (45.0, 0.5)))

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.share:g} of the rate that fills memory, {self.burst_s:g} s"


LOADS = (Load(0.7, 60.0), Load(0.8, 60.0), Load(0.8, 120.0))
LOAD = Unknown("load before the burst, and the burst's length", {load.name: load for load in LOADS}, LOADS[1].name)
COMMON = (
    "Two instances, not the paper's eight. Arrivals are Poisson: a burst of twice the rate begins after 45 s, and half "
    "of the rate follows. The trace is not replayed.",
    "The rate that fills memory is a closed form: prompts of mean length take part of the time, and slow down as many "
    "decodes as KV memory holds.",
    "Lengths are log-normal with the paper's means (LongBench 5.9K and 499 tokens, BurstGPT 642 and 262); their "
    "spreads are assumed.",
    "A step's time is a fit to measured kernels of an A100 or H100, without the time of vLLM's host. Steps are planned "
    "one after the other, in chunks of up to 2,048 tokens beside decodes. By these times, a burst that fills the KV "
    "memory also takes most of the compute.",
    "InferCept is first come, first served with swap space in host memory over PCIe 4. Llumnix is not simulated: "
    "instances of a scenario do not migrate requests.",
    "KunServe has microbatches of at least 1,024 prompt tokens, and its exchange never delays activations.",
)
OWN_WAY = "Floodplain's own way is its default policy with that swap space, and drops where they pay (`relief: auto`)."
