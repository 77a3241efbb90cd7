"""Decode and prefill through the runner, against the fewest bytes and the fewest operations they need."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.timing import (
    NUM_REPEATS,
    NUM_WARMUP,
    Row,
    make_events,
    rate_row,
    read_events,
    time_on_device,
    time_row,
)
from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import UserError
from floodplain.core.free_blocks import BlockId
from floodplain.core.plan import PrefillChunk, StepPlan, TableUpdate
from floodplain.core.request import Request, SeqId
from floodplain.core.sampling import SamplingParams
from floodplain.engine.runner import ModelRunner, StageRunner
from floodplain.memory.arena import Device
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.paged_buffer import PagedBuffer
from floodplain.memory.swap_space import SwapSpace
from floodplain.model.batch import ForwardBatch
from floodplain.model.network.decoder import Decoder
from floodplain.model.network.load import load_decoder
from floodplain.model.sampler import Sampler
from floodplain.model.weights.open_model import open_model

DTYPE = torch.bfloat16
BLOCK_TOKENS = 16
CONTEXT_TOKENS = 1024
BATCHES = (1, 32, 128)
CHUNK_TOKENS = 2048
CHUNK_STARTS = (0, 6144)
NUM_STEPS = NUM_WARMUP + NUM_REPEATS
BLOCKS_EACH = -(-(CONTEXT_TOKENS + NUM_STEPS) // BLOCK_TOKENS)
PROMPT_TOKENS = max(CHUNK_STARTS) + CHUNK_TOKENS


class TimedModel:
    """A decoder that keeps the device's time of each forward pass, and the last batch."""

    def __init__(self, model: Decoder) -> None:
        self.batch: ForwardBatch | None = None
        self._model = model
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model, which is not timed."""
        return getattr(self._model, name)

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """Begin a pass as the model does, behind an event."""
        self._events.append(make_events())
        self._events[-1][0].record()
        self.batch = batch
        return self._model.embed(batch)

    def finish(self, batch: ForwardBatch, x: torch.Tensor) -> torch.Tensor:
        """End the pass as the model does, before an event."""
        logits = self._model.finish(batch, x)
        self._events[-1][1].record()
        return logits

    def take_times(self) -> list[float]:
        """Seconds of the last ``NUM_REPEATS`` passes; forgets all."""
        events, self._events = self._events[-NUM_REPEATS:], []
        return read_events(events)


class ModelBench:
    """A loaded model, a KV pool of at least ``min_pool_bytes`` full of random numbers, and the runner over both.

    The seed is that of weights, KV, prompts and block tables. Raises UserError if it does not fit.
    """

    def __init__(self, name: str, memory: Device, min_pool_bytes: int, seed: int) -> None:
        source = open_model(name, seed)
        self.shape = shape = source.config.shape
        self.layout = KVLayout(
            num_layers=shape.num_layers,
            block_tokens=BLOCK_TOKENS,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=DTYPE,
        )
        self._memory = memory
        self._rng = random.Random(seed)
        self._num_sequences = 0
        self._model = load_decoder(
            source.config,
            source,
            dtype=DTYPE,
            device=memory.torch_device,
            block_tokens=BLOCK_TOKENS,
            allocate=self._allocate_parameters,
        )
        self._timed = TimedModel(self._model)
        self.pool = self._open_pool(min_pool_bytes, seed)
        timed: Any = self._timed
        stage = StageRunner(
            timed,
            self.pool.layers,
            Sampler((), seed),
            block_tokens=BLOCK_TOKENS,
            max_model_len=max(PROMPT_TOKENS, BLOCKS_EACH * BLOCK_TOKENS),
        )
        self._runner = ModelRunner(stage, SwapSpace({}), memory.close)

    def close(self) -> None:
        """Give the memory back."""
        self._runner.close()

    def _allocate_parameters(self, num_bytes: int) -> PagedBuffer:
        buffer = PagedBuffer(self._memory, num_bytes)
        pages = self._memory.allocate(buffer.num_pages)
        if pages is None:
            raise UserError("the model's parameters do not fit on the device: choose a smaller --model")
        buffer.map(pages)
        return buffer

    def _open_pool(self, min_bytes: int, seed: int) -> KVPool:
        num_blocks = max(
            max(BATCHES) * BLOCKS_EACH, PROMPT_TOKENS // BLOCK_TOKENS, -(-min_bytes // self.layout.block_bytes)
        )
        pool = KVPool(self._memory, self.layout, num_blocks)
        ledger = BlockLedger(0, BLOCK_TOKENS, quantum_blocks=pool.quantum_blocks)
        if pool.grow(ledger, pool.max_blocks) is None:
            raise UserError(f"{num_blocks * self.layout.block_bytes} bytes of KV do not fit: choose a smaller --model")
        generator = torch.Generator(self._memory.torch_device).manual_seed(seed)
        for layer in pool.layers:
            layer.normal_(generator=generator)
        return pool

    # -- decode ----------------------------------------------------------------------------------------------------

    def measure_decode(self, copy_rate: float) -> Iterator[Row]:
        """Decode steps: the whole step on the host, the forward pass, and that pass as a graph (no launch gaps).

        Args:
            copy_rate: Bytes that the device can read and write in a second.
        """
        for batch in BATCHES:
            step_s = self._run_decodes(batch)
            floor_s = self._decode_bytes(batch) / copy_rate
            yield time_row(f"decode b{batch}: step", step_s, floor_s)
            yield time_row(f"decode b{batch}: forward", self._timed.take_times(), floor_s)
            yield time_row(f"decode b{batch}: forward as a graph", self._time_graph(), floor_s)

    def _run_decodes(self, batch: int) -> list[float]:
        """Host seconds of each step of ``batch`` sequences. Their KV is what the pool held, in scattered blocks."""
        order = self._scattered_blocks(batch * BLOCKS_EACH)
        decodes = tuple(self._new_sequence() for _ in range(batch))
        tables = tuple(
            TableUpdate(seq_id, 0, order[index * BLOCKS_EACH : (index + 1) * BLOCKS_EACH])
            for index, seq_id in enumerate(decodes)
        )
        last_tokens = tuple(self._chunk(seq_id, CONTEXT_TOKENS - 1, 1) for seq_id in decodes)
        self._runner.execute(StepPlan(0, prefills=last_tokens, tables=tables))
        samples_s = [self._time_step(StepPlan(step, decodes=decodes)) for step in range(NUM_STEPS)]
        self._runner.execute(StepPlan(0, released=decodes))
        return samples_s[NUM_WARMUP:]

    def _time_graph(self) -> list[float]:
        """The last batch once more, captured and replayed."""
        batch, graph = self._timed.batch, torch.cuda.CUDAGraph()
        assert batch is not None
        with torch.cuda.graph(graph):
            self._model.forward(batch, self.pool.layers)
        return time_on_device(graph.replay)

    def _decode_bytes(self, batch: int) -> float:
        """Every parameter once (of an embedding table that is not the head: nothing), and the keys and values."""
        shape = self.shape
        num_unread = 0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size
        mean_context = CONTEXT_TOKENS + NUM_WARMUP + (NUM_REPEATS + 1) / 2
        kv_bytes = batch * mean_context * shape.kv_bytes_per_token(DTYPE.itemsize)
        return (shape.num_params - num_unread) * DTYPE.itemsize + kv_bytes

    # -- prefill ---------------------------------------------------------------------------------------------------

    def measure_prefill(self, product_rate: float) -> Iterator[Row]:
        """One chunk of a prompt, at its beginning and after a longer context.

        Args:
            product_rate: Floating-point operations of a large matrix product in a second.
        """
        seq_id = self._new_sequence()
        blocks = self._scattered_blocks(PROMPT_TOKENS // BLOCK_TOKENS)
        self._runner.execute(StepPlan(0, tables=(TableUpdate(seq_id, 0, blocks),)))
        for start in CHUNK_STARTS:
            plans = [StepPlan(step, prefills=(self._chunk(seq_id, start, CHUNK_TOKENS),)) for step in range(NUM_STEPS)]
            step_s = [self._time_step(plan) for plan in plans][NUM_WARMUP:]
            ceiling = CHUNK_TOKENS * product_rate / self._prefill_operations(start)
            name = f"prefill of {CHUNK_TOKENS} after {start}"
            yield rate_row(f"{name}: step", "tokens/s", CHUNK_TOKENS, step_s, ceiling)
            yield rate_row(f"{name}: forward", "tokens/s", CHUNK_TOKENS, self._timed.take_times(), ceiling)
        self._runner.execute(StepPlan(0, released=(seq_id,)))

    def _prefill_operations(self, start: int) -> float:
        """Of the layers' products, of causal attention, and of the head for one row."""
        shape = self.shape
        num_pairs = CHUNK_TOKENS * start + CHUNK_TOKENS * (CHUNK_TOKENS + 1) / 2
        per_layer = 2 * CHUNK_TOKENS * shape.layer_params + 4 * num_pairs * shape.q_size
        return shape.num_layers * per_layer + 2 * shape.vocab_size * shape.hidden_size

    # -- plans -----------------------------------------------------------------------------------------------------

    def _time_step(self, plan: StepPlan) -> float:
        """Host seconds; a step ends when its tokens are on the host, so the device is idle before and after."""
        begin_s = time.perf_counter()
        self._runner.execute(plan)
        return time.perf_counter() - begin_s

    def _new_sequence(self) -> SeqId:
        self._num_sequences += 1
        return SeqId(self._num_sequences)

    def _scattered_blocks(self, count: int) -> tuple[BlockId, ...]:
        return tuple(map(BlockId, self._rng.sample(range(self.pool.num_blocks), count)))

    def _chunk(self, seq_id: SeqId, start: int, num_tokens: int) -> PrefillChunk:
        """Random tokens, the last of which samples."""
        tokens = tuple(self._rng.randrange(self.shape.vocab_size) for _ in range(num_tokens))
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        request = Request(request_id=str(seq_id), prompt_token_ids=tokens, params=params, arrival_s=0.0)
        return PrefillChunk(seq_id, start, tokens, True, request)


def measure_ceilings() -> Iterator[Row]:
    """A large copy on the device (bytes read and bytes written), then a large bf16 product; of random numbers."""
    source = torch.empty(2**29, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    yield rate_row("device copy", "GB/s", 2 * source.nbytes / 1e9, time_on_device(target.copy_, source))
    del source, target
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=DTYPE) for _ in range(2))
    yield rate_row("bf16 product", "TFLOP/s", 2 * size**3 / 1e12, time_on_device(torch.mm, a, b))
