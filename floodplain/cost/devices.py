"""GPUs by name, what a step costs by their data sheets, and how much memory is left for KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from floodplain.core.errors import UserError
from floodplain.cost.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class AllReduce:
    """The sum over the GPUs that share a matrix: seconds before it begins, and bytes per second that each sends."""

    latency_s: float
    bandwidth: float

    def time_s(self, num_bytes: float, num_shards: int) -> float:
        """Seconds for ``num_bytes`` on each of ``num_shards`` GPUs, in a ring; 0 for one."""
        return (
            self.latency_s + 2 * num_bytes * (num_shards - 1) / num_shards / self.bandwidth if num_shards > 1 else 0.0
        )


NVLINK, PCIE = AllReduce(15e-6, 300e9), AllReduce(25e-6, 40e9)
"""Between the GPUs of a server: assumed. Over PCIe, settings of the host change it by a factor of two to three."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. ``memory_bytes`` is what its driver reports, which is less than the name says.

    ``bandwidth`` is bytes per second of its memory, ``flops`` dense bf16 operations per second, both by data sheet.
    ``overhead_s`` is the time of a step beside its kernels, as one real run of vLLM showed; 0 where there is none.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops: float
    all_reduce: AllReduce
    source: str
    overhead_s: float = 0.0


def _gib(number: float) -> int:
    """Bytes of a number of GiB, as torch prints the memory of a device in its messages."""
    return round(number * 2**30)


_TABLE = (
    Device("rtx4090", 25_250_627_584, 1.008e12, 165.2e12, PCIE,
           "NVIDIA Ada whitepaper, fp32 accumulation; memory as torch reports it"),
    Device("rtxpro6000", _gib(94.97), 1.792e12, 503.8e12, PCIE,
           "NVIDIA RTX PRO 6000 Blackwell data sheet", overhead_s=0.001),
    Device("a100-40gb", _gib(39.39), 1.555e12, 312e12, NVLINK, "NVIDIA A100 SXM data sheet"),
    Device("a100-80gb", _gib(79.25), 2.039e12, 312e12, NVLINK, "NVIDIA A100 SXM data sheet"),
    Device("a800-80gb", _gib(79.25), 2.039e12, 312e12, AllReduce(15e-6, 200e9),
           "NVIDIA A800 data sheet: an A100 with 400 GB/s of NVLink; memory as of the A100"),
    Device("h800-80gb", _gib(79.19), 3.35e12, 989.4e12, AllReduce(15e-6, 200e9),
           "NVIDIA H800 data sheet: an H100 with 400 GB/s of NVLink; memory as of the H100"),
    Device("h100-80gb", _gib(79.19), 3.35e12, 989.4e12, NVLINK, "NVIDIA H100 SXM data sheet"),
    Device("h200", _gib(139.8), 4.8e12, 989.4e12, NVLINK, "NVIDIA H200 SXM data sheet"),
    Device("gh200-96gb", _gib(95.0), 4.0e12, 989.4e12, NVLINK, "NVIDIA GH200 data sheet; memory assumed"),
)  # fmt: skip
DEVICES: dict[str, Device] = {device.name: device for device in _TABLE}


def device_named(name: str) -> Device:
    """The device called ``name``, in any case of letters; UserError, with all names, if there is none."""
    device = DEVICES.get(name.lower())
    if device is None:
        raise UserError(f"no device is called {name!r}; there are {', '.join(sorted(DEVICES))}")
    return device


MEMORY_SHARE, COMPUTE_SHARE = 0.8, 0.6
"""Parts of the data sheet's bandwidth and operations that kernels reach: assumed. With them, mean times of two real
runs under load (RTX 4090, RTX PRO 6000; Llama-3.1-8B) are 6 to 18 % off."""
LAUNCH_S = 4e-6
"""Seconds between two kernels of a layer under CUDA graphs, and their number: assumed."""
KERNELS_PER_LAYER = 10


@dataclass(frozen=True, slots=True)
class Roofline:
    """A step's time by the data sheet, without measurements: the slower of memory and arithmetic, and the launches.

    ``num_shards`` GPUs hold a part of each matrix and head each, and add up their results twice a layer. ``overhead_s``
    is added to each step.
    """

    shape: ModelShape
    device: Device
    num_shards: int = 1
    dtype_bytes: int = 2
    overhead_s: float = 0.0

    def batch_s(self, contexts: Sequence[int], chunks: Sequence[tuple[int, int]], num_sampled: int) -> float:
        """As ``step_time.BatchCost``."""
        shape = self.shape
        num_tokens = len(contexts) + sum(tokens for _, tokens in chunks)
        if not num_tokens:
            return 0.0
        pairs = sum(contexts) + sum(before * tokens + tokens * (tokens + 1) // 2 for before, tokens in chunks)
        read_tokens = sum(contexts) + sum(before + tokens for before, tokens in chunks)
        head_params = shape.vocab_size * shape.hidden_size
        experts = max(1, shape.num_experts) * shape.expert_params
        read = shape.layer_params - experts + shape.count_active_experts(num_tokens) * shape.expert_params
        used = shape.layer_params - experts + max(1, shape.experts_per_token) * shape.expert_params
        matrices_s = self._slower_s(
            self.dtype_bytes * (shape.num_layers * read + head_params),
            2 * (num_tokens * shape.num_layers * used + num_sampled * head_params),
        )
        token_bytes = self.num_shards * shape.kv_bytes_per_token(self.dtype_bytes, self.num_shards)
        attention_s = self._slower_s(read_tokens * token_bytes, 4 * pairs * shape.q_size * shape.num_layers)
        sums_s = 2 * self.device.all_reduce.time_s(num_tokens * shape.hidden_size * self.dtype_bytes, self.num_shards)
        launches_s = shape.num_layers * (KERNELS_PER_LAYER * LAUNCH_S + sums_s)
        return matrices_s + attention_s + launches_s + self.overhead_s

    def _slower_s(self, num_bytes: float, operations: float) -> float:
        memory_s = num_bytes / (self.num_shards * MEMORY_SHARE * self.device.bandwidth)
        return max(memory_s, operations / (self.num_shards * COMPUTE_SHARE * self.device.flops))


LOGIT_BYTES = 26
"""Bytes that vLLM's profile run holds for each logit: bf16, fp32, sorted values, indices, probabilities and sums."""
CONTEXT_BYTES = 375_000_000
"""CUDA context and libraries. With ``LOGIT_BYTES`` it gives the pool of one real run on an RTX 4090 within 1 %."""


def predict_blocks(
    shape: ModelShape,
    device: Device,
    *,
    utilisation: float,
    max_num_seqs: int,
    max_batched_tokens: int,
    block_tokens: int = 16,
    num_shards: int = 1,
    dtype_bytes: int = 2,
) -> int:
    """KV blocks that a server as vLLM gives to requests: the memory less weights, activations, and one null block.

    Activations are the larger of one layer's, for ``max_batched_tokens``, and the logits of ``max_num_seqs``.
    UserError, with the bytes of each, if less than one block is left.
    """
    budget = utilisation * device.memory_bytes
    weights = shape.param_bytes(dtype_bytes) / num_shards
    layer = max_batched_tokens * (2 * shape.hidden_size + 3 * shape.ffn_size / num_shards) * dtype_bytes
    activations = max(layer, max_num_seqs * shape.vocab_size * LOGIT_BYTES)
    block_bytes = block_tokens * shape.kv_bytes_per_token(dtype_bytes, num_shards)
    num_blocks = int((budget - weights - activations - CONTEXT_BYTES) // block_bytes) - 1
    if num_blocks < 1:
        raise UserError(
            f"{shape.name} does not fit on {num_shards} x {device.name}: of {budget / 1e9:.1f} GB each, weights take "
            f"{weights / 1e9:.1f} GB, activations {activations / 1e9:.1f} GB: use more GPUs, or a smaller model"
        )
    return num_blocks
