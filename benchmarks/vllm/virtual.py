"""A virtual clock for an engine of vLLM in this process: each step and each copy takes a computed time.

vLLM's scheduler, block pool and runner and the plug-in run unchanged, over a model of one tiny layer. The clock stands
still while they compute. It moves by the price of a step when the step ends, and to the end of a copy or the next
arrival when no step computes. So a run is deterministic, and what else the machine does changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.step_line import StepLine
from floodplain.core.plan import Transfer
from floodplain.core.tiers import CopyTime, Link, Tier
from floodplain.memory.swap_space import SwapSpace
from floodplain.plugins.vllm import scheduler as plugin
from floodplain.plugins.vllm.worker import SwapWorker
from floodplain.sim.links import VirtualLinks

COPY_LATENCY_S = 1e-5
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 2048, "torch_dtype": "float32", "tie_word_embeddings": True,
}  # fmt: skip
"""The configuration of a model whose tokens mean nothing; requests end by their length."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What steps and copies cost.

    Attributes:
        line: Of a step.
        block_s: Seconds for the copy of a KV block of 32 tokens.
        copies_cost: Whether copies take their time from steps, as on a CPU, whose cores make them.
    """

    line: StepLine
    block_s: float
    copies_cost: bool


HARDWARE = {
    "cpu": Hardware(StepLine(base_s=0.0132, decode_s=0.00064, prefill_token_s=0.0005), 32 * 23_040 / 0.76e9, True),
    "h100": Hardware(
        StepLine(base_s=0.0300, decode_s=0.000304, prefill_token_s=0.0000909),
        32 * 80 * 2 * 8 * 128 * 2 / 8 / 50e9,
        False,
    ),
    "rtxpro6000": Hardware(
        StepLine(base_s=0.046, decode_s=0.0027, prefill_token_s=16 * 0.00025), 32 * 16 * 262_144 / 50e9, False
    ),
}
"""SmolLM2-135M on two cores and Llama-2-70B on eight H100 over PCIe 5, both as in ``benchmarks/policies``.

``rtxpro6000``: Qwen3-32B on one card as in ``benchmarks/turns``, where a token here stands for 16 of a prompt.
"""


class VirtualClock:
    """Seconds since the start; the plug-in reads it as its own clock.

    Args:
        hardware: The prices.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.now_s = 0.0
        self.next_arrival_s = float("inf")
        self._step_s = 0.0

    def now(self) -> float:
        """Return the time."""
        return self.now_s

    def wall_s(self) -> float:
        """Return the time: the plug-in has one clock."""
        return self.now_s

    def sleep_until(self, end_s: float) -> None:
        """Move on, never back."""
        self.now_s = max(self.now_s, end_s)

    def begin_step(self, sizes: Sequence[int]) -> None:
        """Set the price of the step that was planned: a size of 1 is a decode, more is a chunk of a prompt."""
        line, num_decodes = self.hardware.line, sizes.count(1)
        num_prefill = sum(sizes) - num_decodes
        work_s = line.base_s + line.decode_s * num_decodes + line.prefill_token_s * num_prefill
        self._step_s = work_s if sizes else 0.0

    def add_copy(self, duration_s: float) -> None:
        """Add a copy to the price of the step, if copies take their time from steps."""
        if self.hardware.copies_cost and self._step_s:
            self._step_s += duration_s

    def end_step(self) -> None:
        """Move to the end of the step; a second call does nothing."""
        self.now_s, self._step_s = self.now_s + self._step_s, 0.0


class VirtualSpace:
    """A worker's swap space whose copies move real bytes at once, and end when their links would have ended them."""

    def __init__(self, space: SwapSpace, clock: VirtualClock) -> None:
        self._space, self._clock = space, clock
        bandwidth = 1.0 / clock.hardware.block_s  # in blocks
        self._links = VirtualLinks({tier: Link(tier, bandwidth, COPY_LATENCY_S) for tier in Tier}, block_bytes=1)
        self._ending: list[tuple[float, int, Sequence[int]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._space, name)

    @property
    def num_in_flight(self) -> int:
        """Copies that have not ended on the clock."""
        return len(self._ending)

    def start(self, transfer: Transfer) -> None:
        """Copy now; end later."""
        self._space.start(transfer)
        ended = self._space.wait(60.0)
        assert [transfer_id for transfer_id, _ in ended] == [transfer.transfer_id]
        end_s = self._links.start(transfer, self._clock.now())
        self._ending.append((end_s, *ended[0]))
        self._clock.add_copy(len(transfer.blocks) * self._clock.hardware.block_s)

    def poll(self) -> list[tuple[int, Sequence[int]]]:
        """Return the copies that have ended, after the step that ran beside them."""
        self._clock.end_step()
        now = self._clock.now()
        ended = sorted(each for each in self._ending if each[0] <= now)
        self._ending = [each for each in self._ending if each[0] > now]
        return [each[1:] for each in ended]

    def wait(self, timeout_s: float) -> list[tuple[int, Sequence[int]]]:
        """As ``poll``; moves the clock to the first end, the next arrival, or the end of the wait."""
        if not (ended := self.poll()) and self._ending:
            now, first_s = self._clock.now(), min(self._ending)[0]
            self._clock.sleep_until(min(now + timeout_s, first_s, max(now, self._clock.next_arrival_s)))
            ended = self.poll()
        return ended

    def take_copy_times(self) -> list[CopyTime]:
        """Return the times of the links, not those of the real copies."""
        self._space.take_copy_times()
        return self._links.take_copy_times(self._clock.now())


def write_tiny_model(folder: Path) -> Path:
    """Write a folder that vLLM loads with dummy weights and without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def give_clock(scheduler: Any, worker: SwapWorker | None, clock: VirtualClock) -> None:
    """Let an engine's scheduler, and the plug-in's worker if there is one, run on a virtual clock."""
    plugin.time = SimpleNamespace(monotonic=clock.now, time=clock.now)  # type: ignore[assignment]
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def priced_schedule(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        clock.begin_step(list(output.num_scheduled_tokens.values()))
        return output

    def timed_update(*args: Any, **kwargs: Any) -> Any:
        clock.end_step()
        return update(*args, **kwargs)

    scheduler.schedule, scheduler.update_from_output = priced_schedule, timed_update
    if worker is not None:
        worker._space = VirtualSpace(worker._space, clock)  # type: ignore[assignment]
