"""What it costs to put the pages of dropped parameters behind KV, and back: no byte is copied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.gpu.timing import Row, time_on_host, time_row
from floodplain.core.errors import InvariantError
from floodplain.memory.cuda.device import CudaDevice
from floodplain.memory.group_memory import GroupMemory
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.paged_buffer import PagedBuffer

NUM_LAYERS = 8
"""Half of them are dropped."""
LAYER_BYTES = 2**28
NUM_REMAPS = 15


def measure_remap(device: CudaDevice, layout: KVLayout, layer_bytes: int = LAYER_BYTES) -> Iterator[Row]:
    """Drop half of the layers and restore them, again and again: milliseconds for each GB of parameters.

    Of the layout of the model's KV the number of layers is not looked at.
    """
    layout = replace(layout, num_layers=NUM_LAYERS)
    buffers = [PagedBuffer(device, layer_bytes) for _ in range(NUM_LAYERS)]
    for buffer in buffers:
        pages = device.allocate(buffer.num_pages)
        if pages is None:
            raise InvariantError(f"no memory is free for {NUM_LAYERS} layers of {layer_bytes} bytes")
        buffer.map(pages)
    memory = GroupMemory(device, layout, buffers)
    kept = range(NUM_LAYERS // 2)
    num_pages = sum(buffer.num_pages for buffer in buffers[kept.stop :])
    num_quanta = num_pages // (len(kept) * memory.quantum_pages)
    samples: dict[str, list[float]] = {"parameters to KV": [], "KV to parameters": []}
    for _ in range(NUM_REMAPS):
        time_on_host(samples["parameters to KV"], memory.drop, (), (), (), kept, 0, num_quanta)
        time_on_host(samples["KV to parameters"], _restore, memory)
        memory.close_group()
    num_gb = num_quanta * len(kept) * memory.quantum_pages * device.page_bytes / 1e9
    for name, samples_s in samples.items():
        row = time_row(f"remap: {name}, {num_gb:.2g} GB", [sample_s / num_gb for sample_s in samples_s])
        yield replace(row, unit="ms/GB")


def _restore(memory: GroupMemory) -> None:
    memory.shrink((), memory.quanta)
    if not memory.map_parameters():
        raise InvariantError("parameters that were dropped have no pages")
