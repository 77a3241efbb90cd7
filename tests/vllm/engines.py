"""Engines of vLLM under test, stock and ours, and a load for both."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory

from floodplain.plugins.vllm.connector_parts import find_own
from floodplain.plugins.vllm.scheduler import FloodplainScheduler
from floodplain.plugins.vllm.swap_controller import SwapController
from floodplain.plugins.vllm.worker import SwapWorker

BLOCK_TOKENS = 32
MAX_MODEL_LEN = 512
TINY = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "torch_dtype": "float32", "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 40_000, "max_position_embeddings": 512, "sliding_window": 48, "query_pre_attn_scalar": 32,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
"""A model without weights: vLLM draws the same ones each time."""


@dataclass(frozen=True)
class Load:
    """Greedy requests, each with a fixed number of output tokens."""

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompts)

    def params(self, index: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=self.lengths[index], ignore_eos=True)

    def send(self, llm: LLM, indices: Sequence[int] | None = None) -> None:
        for index in range(len(self)) if indices is None else indices:
            prompt = {"prompt_token_ids": list(self.prompts[index])}
            llm.llm_engine.add_request(str(index), prompt, self.params(index))


def make_load(seed: int, num_requests: int, *, num_common: int = 0) -> Load:
    """Random prompts that all begin with the same ``num_common`` tokens."""
    rng = Random(seed)
    common = [rng.randrange(10, 40_000) for _ in range(num_common)]
    tails = ([rng.randrange(10, 40_000) for _ in range(rng.randrange(20, 180))] for _ in range(num_requests))
    prompts = tuple((*common, *tail) for tail in tails)
    return Load(prompts, tuple(rng.randrange(20, 100) for _ in range(num_requests)))


def make_tiny(folder: Path, kinds: list[str]) -> dict[str, Any]:
    """Flags for a model whose layers have these kinds of attention."""
    layers = {"layer_types": [f"{kind}_attention" for kind in kinds], "num_hidden_layers": len(kinds)}
    (folder / "config.json").write_text(json.dumps(TINY | layers))
    return {"load_format": "dummy", "skip_tokenizer_init": True}


def make_stock(model: Path, **flags: Any) -> LLM:
    """Stock vLLM, with room for all requests unless flags change that."""
    return LLM(
        **{
            "model": str(model), "dtype": "float32", "block_size": BLOCK_TOKENS, "num_gpu_blocks_override": 400,
            "max_model_len": MAX_MODEL_LEN, "enable_prefix_caching": False, "enforce_eager": True,
            "async_scheduling": False, "max_num_seqs": 32, "seed": 0,
        }
        | flags
    )  # fmt: skip


def transfer_config(settings: dict[str, Any]) -> KVTransferConfig:
    """vLLM's setting that names our connector, with these settings of ours."""
    return KVTransferConfig(
        kv_connector="FloodplainConnector",
        kv_connector_module_path="floodplain.plugins.vllm.connector",
        kv_role="kv_both",
        kv_connector_extra_config=settings,
    )


def make_ours(model: Path, settings: dict[str, Any], **flags: Any) -> LLM:
    """vLLM with the plug-in, and otherwise the flags of ``make_stock``."""
    ours = {
        "scheduler_cls": "floodplain.plugins.vllm.scheduler.FloodplainScheduler",
        "kv_transfer_config": transfer_config(settings),
    }
    return make_stock(model, **(ours | flags))


def make_crowded(model: Path, **flags: Any) -> LLM:
    """Ours with a pool for less than half of 16 requests, and prompts in chunks of 64 tokens."""
    small = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 64}
    return make_ours(model, {"policy": "cfs", "slice": 4, "swap_memory": "256MiB"}, **(small | flags))


@contextmanager
def as_made(llm: LLM) -> Iterator[None]:
    """Restore the policy and the books that a test replaces; check that nothing is left in use."""
    scheduler = scheduler_of(llm)
    policy, books = scheduler.policy_object, scheduler._controller.books
    scheduler._controller.watchers.clear()
    yield
    expect_nothing_left(llm)
    scheduler.policy_object, scheduler._controller.books = policy, books


def close(llm: LLM) -> None:
    """Shut an engine down, so that this process can make another one."""
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


def scheduler_of(llm: LLM) -> FloodplainScheduler:
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    found = core.scheduler
    assert isinstance(found, FloodplainScheduler)
    return found


def controller_of(llm: LLM) -> SwapController:
    return scheduler_of(llm)._controller


def worker_of(llm: LLM) -> SwapWorker:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    own = find_own(get_kv_transfer_group())
    assert own is not None and own._worker is not None
    return own._worker


@dataclass
class Run:
    """The result of a load.

    Attributes:
        tokens: Of each finished request, by index.
        resumed: Tokens computed in the step of a resumption, for requests that had output tokens.
        num_steps: Steps taken.
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)
    num_steps: int = 0


def drive(llm: LLM, load: Load, *, each_step: Callable[[int], None] = lambda step: None) -> Run:
    """Serve a load to its end."""
    run, scheduler = Run(), scheduler_of(llm)
    planned = scheduler.note_step

    def note(output: Any) -> None:
        for request_id in output.scheduled_cached_reqs.resumed_req_ids:
            if scheduler._controller.roster[request_id].request.num_output_tokens:
                run.resumed.append(output.num_scheduled_tokens[request_id])
        planned(output)

    scheduler.note_step = note  # type: ignore[method-assign]
    load.send(llm)
    while llm.llm_engine.has_unfinished_requests():
        each_step(run.num_steps)
        run.num_steps += 1
        run.tokens |= finished_tokens(llm)
        assert run.num_steps < 20_000, "it does not end"
    del scheduler.note_step
    return run


def drive_with_aborts(
    llm: LLM, load: Load, expected: dict[int, list[int]], *, seed: int, number: int, period: int,
    on_abort: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Serve a load, and abort ``number`` random requests, one every ``period`` steps; others keep their tokens."""
    dice, aborted = Random(seed), set[int]()

    def abort(step: int) -> None:
        if step % period == period // 2 and len(aborted) < number:
            victim = dice.choice([index for index in range(len(load)) if index not in aborted])
            aborted.add(victim)
            on_abort()
            llm.llm_engine.abort_request([str(victim)])

    tokens = drive(llm, load, each_step=abort).tokens
    assert len(aborted) == number
    assert tokens == {index: expected[index] for index in tokens} and len(tokens) >= len(load) - number


def finished_tokens(llm: LLM) -> dict[int, list[int]]:
    """Take a step; return the tokens of requests that finished in it, of all their answers."""
    ended = [output for output in llm.llm_engine.step() if output.finished]
    return {int(one.request_id): [token for answer in one.outputs for token in answer.token_ids] for one in ended}


def serve_calmly(model: Path, load: Load, **flags: Any) -> dict[int, list[int]]:
    """The tokens of stock vLLM with room for all requests; its engine is closed afterwards."""
    return serve_all_calmly(model, [load], **flags)[load]


def serve_all_calmly(model: Path, loads: Sequence[Load], **flags: Any) -> dict[Load, dict[int, list[int]]]:
    """The same of several loads, one after the other in one engine."""
    llm = make_stock(model, **flags)
    found = {load: serve_all(llm, load) for load in loads}
    close(llm)
    return found


def serve_all(llm: LLM, load: Load) -> dict[int, list[int]]:
    """Serve a load to its end, in an engine of any kind."""
    tokens: dict[int, list[int]] = {}
    load.send(llm)
    while llm.llm_engine.has_unfinished_requests():
        tokens |= finished_tokens(llm)
    return tokens


def expect_nothing_left(llm: LLM) -> None:
    """Let copies in flight end; check that no block and no slot is in use, and that no request is left."""
    scheduler, controller = scheduler_of(llm), controller_of(llm)
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    for _ in range(100):
        if not len(controller.books.transfers) and not core.batch_queue:
            break
        core.step_fn()
    controller.books.backups.check_integrity()
    assert len(controller.books.transfers) == 0 and len(controller.roster) == 0
    assert all(slots.num_taken == 0 for slots in controller.books.backups.slots.values())
    assert scheduler.finder.count_free() == scheduler.finder.num_blocks
    assert not scheduler.running and not len(scheduler.waiting)
