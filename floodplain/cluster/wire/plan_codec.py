"""Step plans and their tokens as frames between stages: only what a stage needs of a plan.

Stages behind the first get activations instead of token ids, and a request's tokens only if its parameters use the
history. Everything is checked against the stage's own sizes: a block id out of range would end the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from floodplain.cluster.wire.frames import Frame
from floodplain.core.codec import WireError, from_json, to_json
from floodplain.core.errors import PeerLost, UserError
from floodplain.core.free_blocks import BlockId
from floodplain.core.plan import NO_TOKEN, PrefillChunk, StepPlan, StepResult, TableUpdate, TokenLogprobs
from floodplain.core.ranges import SECONDS
from floodplain.core.request import Request, SeqId
from floodplain.core.sampling import SamplingParams

MAX_STAGES = 256


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The bounds of a plan; ``hidden_size`` and ``dtype`` are those of activations."""

    num_blocks: int
    max_model_len: int
    max_batched_tokens: int
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype

    @property
    def max_data_bytes(self) -> int:
        """Bytes of the largest activations of a step."""
        return self.max_batched_tokens * self.hidden_size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StageStep:
    """A plan with its activations [T, hidden], and the seconds that each stage so far computed for it.

    Behind the first stage the plan's token ids are zeros.
    """

    plan: StepPlan
    x: torch.Tensor
    busy_s: tuple[float, ...]


def pack_plan(step: StageStep, keeps_tensor: bool = False) -> Frame:
    """The frame of a plan for the next stage, with its activations as host bytes or (``keeps_tensor``) as a tensor."""
    plan = step.plan
    body = {
        "step": plan.step_id,
        "busy_s": step.busy_s,
        "num_decodes": len(plan.decodes),
        "chunks": [_pack_chunk(chunk) for chunk in plan.prefills],
        "tables": [(table.seq_id, table.start, len(table.blocks)) for table in plan.tables],
        "released": plan.released,
    }
    blocks = [block for table in plan.tables for block in table.blocks]
    histories = [token_id for chunk in plan.prefills for token_id in _history(chunk)]
    integers = np.array([*plan.decodes, *blocks, *histories], dtype=np.int64)
    if keeps_tensor:
        return Frame(body, integers, tensor=step.x)
    return Frame(body, integers, step.x.contiguous().cpu().view(torch.uint8).numpy().reshape(-1))


def _pack_chunk(chunk: PrefillChunk) -> tuple[object, ...]:
    request = chunk.request
    new = None if request is None else (len(request.known_token_ids), to_json(request.params), len(_history(chunk)))
    return chunk.seq_id, chunk.start, len(chunk.token_ids), chunk.samples, new


def _history(chunk: PrefillChunk) -> tuple[int, ...]:
    """The tokens of a new request, prompt first, if its parameters use them."""
    request = chunk.request
    if request is None or not _needs_tokens(request.params):
        return ()
    return request.prompt_token_ids + request.known_token_ids


def _needs_tokens(params: SamplingParams) -> bool:
    return params.uses_history or params.prompt_logprobs is not None


def read_plan(frame: Frame, limits: PlanLimits) -> StageStep:
    """The plan in a frame. Raises ``PeerLost`` if it is no valid plan within ``limits``."""
    try:
        plan = _read_plan(frame, limits)
        busy_s = _read_busy(frame)
    except (KeyError, TypeError, ValueError, OverflowError, WireError, UserError) as error:
        raise PeerLost(f"a stage sent a plan that is none ({error!r})") from None
    if frame.tensor is not None:
        if frame.tensor.shape != (plan.num_tokens, limits.hidden_size) or frame.data.nbytes:
            raise PeerLost(f"a stage sent activations {tuple(frame.tensor.shape)} for {plan.num_tokens} tokens")
        return StageStep(plan, frame.tensor, busy_s)
    num_bytes = plan.num_tokens * limits.hidden_size * limits.dtype.itemsize
    if frame.data.nbytes != num_bytes:
        raise PeerLost(f"a stage sent {frame.data.nbytes} bytes of activations, not {num_bytes}")
    x = torch.from_numpy(frame.data).view(limits.dtype).view(plan.num_tokens, limits.hidden_size)
    return StageStep(plan, x, busy_s)


def _read_plan(frame: Frame, limits: PlanLimits) -> StepPlan:
    body, num_decodes = frame.body, _count(frame.body["num_decodes"], len(frame.integers))
    numbers = frame.integers[num_decodes:]
    num_blocks = sum(_count(count) for _, _, count in body["tables"])
    blocks, histories = numbers[:num_blocks], iter(numbers[num_blocks:].tolist())
    if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < limits.num_blocks:
        raise ValueError("a block that is not there")
    tables, begin = [], 0
    for seq_id, start, count in body["tables"]:
        end = begin + _count(count, len(blocks) - begin)
        _count(start + count, limits.max_model_len)
        named = tuple(map(BlockId, blocks[begin:end].tolist()))
        tables.append(TableUpdate(SeqId(_count(seq_id)), _count(start), named))
        begin = end
    prefills = tuple(_read_chunk(chunk, histories, limits) for chunk in body["chunks"])
    if any(True for _ in histories):
        raise ValueError("blocks of no table, or tokens of no request")
    return StepPlan(
        step_id=_count(body["step"]),
        decodes=tuple(map(SeqId, frame.integers[:num_decodes].tolist())),
        prefills=prefills,
        tables=tuple(tables),
        released=tuple(SeqId(_count(seq_id)) for seq_id in body["released"]),
    )


def _read_chunk(chunk: Sequence[Any], histories: Iterator[int], limits: PlanLimits) -> PrefillChunk:
    seq_id, start, num_tokens, samples, new = chunk
    _count(_count(start) + _count(num_tokens, limits.max_batched_tokens), limits.max_model_len)
    if not num_tokens or not isinstance(samples, bool):
        raise ValueError("a chunk without tokens")
    request = None if new is None else _read_request(new, histories, limits)
    return PrefillChunk(SeqId(_count(seq_id)), start, (0,) * num_tokens, samples, request)


def _read_request(new: Sequence[Any], histories: Iterator[int], limits: PlanLimits) -> Request:
    """A request as far as a stage behind the first needs it. Without a history its known tokens are zeros."""
    num_known, params, num_history = new
    sampling = from_json(SamplingParams, params)
    _count(num_known, limits.max_model_len)
    tokens = tuple(islice(histories, _count(num_history, limits.max_model_len)))
    if len(tokens) != num_history or _needs_tokens(sampling) != (len(tokens) > num_known):
        raise ValueError("a request without its tokens")
    num_prompt = max(0, len(tokens) - num_known)
    request = Request(
        request_id="",
        prompt_token_ids=tokens[:num_prompt],
        params=sampling,
        arrival_s=0.0,
        known_token_ids=tokens[num_prompt:] or (0,) * num_known,
    )
    request.check_tokens(limits.vocab_size)
    return request


def pack_result(result: StepResult, busy_s: tuple[float, ...]) -> Frame:
    """The frame of a step's tokens, for the first stage."""
    logprobs = [(seq_id, to_json(one)) for seq_id, one in result.logprobs.items()]
    scores = [(seq_id, [to_json(one) for one in of_prompt]) for seq_id, of_prompt in result.prompt_logprobs.items()]
    body = {"step": result.step_id, "busy_s": busy_s, "logprobs": logprobs, "prompt_logprobs": scores}
    return Frame(body, np.array(result.token_ids, dtype=np.int64))


def read_result(frame: Frame, plan: StepPlan, vocab_size: int) -> tuple[StepResult, tuple[float, ...]]:
    """(tokens of a plan, seconds of each stage). Raises ``PeerLost`` if they are invalid, or those of another plan."""
    tokens = frame.integers
    try:
        if _count(frame.body["step"]) != plan.step_id or len(tokens) != len(plan.sampled):
            raise ValueError("another step")
        if len(tokens) and not NO_TOKEN <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise ValueError("no token")
        logprobs = {SeqId(_count(seq_id)): from_json(TokenLogprobs, one) for seq_id, one in frame.body["logprobs"]}
        scores = {
            SeqId(_count(seq_id)): tuple(from_json(TokenLogprobs, one) for one in of_prompt)
            for seq_id, of_prompt in frame.body["prompt_logprobs"]
        }
        busy_s = _read_busy(frame)
    except (KeyError, TypeError, ValueError, OverflowError, WireError) as error:
        raise PeerLost(f"the last stage sent tokens that are none ({error!r})") from None
    return StepResult(plan.step_id, tokens.tolist(), logprobs, scores), busy_s


def _read_busy(frame: Frame) -> tuple[float, ...]:
    busy_s = tuple(map(float, frame.body["busy_s"]))
    if len(busy_s) > MAX_STAGES or any(SECONDS.problem(one) for one in busy_s):
        raise ValueError("times out of their range")
    return busy_s


def _count(value: object, most: int = 2**62) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError("a number out of its range")
    return value
