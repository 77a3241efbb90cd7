"""A model that several workers share, and faults of one of these workers."""

from __future__ import annotations

import json
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer import get_kv_transfer_group

from floodplain.core.plan import Transfer, TransferKind
from floodplain.memory.swap_slots import EMPTY_DIGEST
from floodplain.plugins.vllm.messages import StepOrders
from floodplain.plugins.vllm.worker import SwapWorker

LAG_STEPS = 3
END_S = 20.0
"""Workers of a closed engine exit within this time."""
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "hidden_act": "silu",
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 40_000, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def write_llama(folder: Path) -> None:
    """Write a Llama with random weights, the same each time.

    vLLM's own random weights (``load_format="dummy"``) are drawn for each worker's part, so two workers would not serve
    the model that one serves. These are large enough that every token depends on the whole context.
    """
    hidden, inner, vocab = LLAMA["hidden_size"], LLAMA["intermediate_size"], LLAMA["vocab_size"]
    queries, keys = (LLAMA[f"num_{kind}_heads"] * LLAMA["head_dim"] for kind in ("attention", "key_value"))
    shapes = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def draw(num_out: int, num_in: int) -> torch.Tensor:
        return torch.randn((num_out, num_in), generator=generator) * (2.0 / num_in**0.5)

    weights = {"model.embed_tokens": draw(vocab, hidden), "lm_head": draw(vocab, hidden)}
    weights["model.norm"] = torch.ones(hidden)
    for layer in range(LLAMA["num_hidden_layers"]):
        own = {name: draw(*shape) for name, shape in shapes.items()}
        own |= {"input_layernorm": torch.ones(hidden), "post_attention_layernorm": torch.ones(hidden)}
        weights |= {f"model.layers.{layer}.{name}": weight for name, weight in own.items()}
    (folder / "config.json").write_text(json.dumps(LLAMA))
    tensors = {f"{name}.weight": weight for name, weight in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@contextmanager
def processes_end() -> Iterator[None]:
    """Each process that is started in the context exits with it, or is killed by its process id.

    Raises:
        AssertionError: A process had to be killed, and nothing else has failed.
    """
    before = set(multiprocessing.active_children())
    has_failed = True
    try:
        yield
        has_failed = False
    finally:
        killed = []
        for process in set(multiprocessing.active_children()) - before:
            process.join(0.0 if has_failed else END_S)
            if process.is_alive():
                process.kill()
                process.join()
                killed.append(process.name)
    assert not killed, f"an engine left {killed}"


# -- in the process of a worker ----------------------------------------------------------------------------------------


class Shard:
    """Mixed into vLLM's workers (``worker_extension_cls``); its methods are called by ``LLM.collective_rpc``."""

    rank: int

    def count_moved(self) -> dict[str, int]:
        """Bytes that this worker has moved ``out`` and ``in`` so far, and copies that failed."""
        stats = _worker()._space.stats()
        moved = {direction: num_bytes for (direction, _), num_bytes in stats.traffic_bytes.items()}
        return moved | {"failed": sum(stats.failed_copies.values())}

    def set_fault(self, name: str, rank: int = 1) -> None:
        """Give one rank this fault, and remove all others."""
        worker = _worker()
        vars(worker).pop("begin", None)
        if name and self.rank == rank:
            worker.begin = FAULTS[name](worker)  # type: ignore[method-assign]


def _worker() -> SwapWorker:
    worker = get_kv_transfer_group()._worker  # type: ignore[attr-defined]
    assert isinstance(worker, SwapWorker)
    return worker


def _skip(worker: SwapWorker) -> Callable[[StepOrders], None]:
    """Skip swap-ins, and report all of their blocks as whole."""
    begin = worker.begin

    def begin_rest(orders: StepOrders) -> None:
        skipped = [one for one in orders.transfers if one.kind is TransferKind.SWAP_IN]
        begin(replace(orders, transfers=tuple(one for one in orders.transfers if one not in skipped)))
        worker._inbound |= {one.transfer_id for one in skipped}
        worker._drained += [(one.transfer_id, ()) for one in skipped]

    return begin_rest


def _lag(worker: SwapWorker) -> Callable[[StepOrders], None]:
    """Begin copies ``LAG_STEPS`` steps later than other ranks."""
    begin, held = worker.begin, deque[tuple[Transfer, ...]]([()] * LAG_STEPS)

    def begin_late(orders: StepOrders) -> None:
        held.append(orders.transfers)
        begin(replace(orders, transfers=held.popleft()))

    return begin_late


def _damage(worker: SwapWorker) -> Callable[[StepOrders], None]:
    """Flip bits of swap space between steps."""
    begin, slots, dice = worker.begin, worker.slots, Random(9)

    def begin_after_damage(orders: StepOrders) -> None:
        written = [slot for slot in range(slots.num_slots) if slots.digests[slot] != EMPTY_DIGEST]
        for slot in dice.sample(written, min(2, len(written))):
            slots.words[slot, 3, 5] ^= 1 << 20
        begin(orders)

    return begin_after_damage


FAULTS = {"skips": _skip, "lags": _lag, "damages": _damage}
