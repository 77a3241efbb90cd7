"""The open-loop load client: sends every request at its arrival time, independent of earlier answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from contextlib import aclosing

from tqdm import tqdm

from floodplain.core.errors import UserError
from floodplain.workload.records import LoadRequest, LoadTarget, RequestFailed, RequestRecord, TokenChunk


async def run_load(
    target: LoadTarget,
    requests: Sequence[LoadRequest],
    *,
    progress: bool = True,
    about: str | None = None,
    max_concurrency: int | None = None,
) -> list[RequestRecord]:
    """Send every request at its arrival time, and return a record for each, in the order of ``requests``.

    A request that fails is recorded with its error; any other exception of the target is a bug and ends the load.
    Cancelling aborts requests in flight. At most ``max_concurrency`` are sent at a time; the others then wait *before*
    they are sent, and the load is no longer open-loop. ``about`` stands before the progress bar on standard error.
    """
    if max_concurrency is not None and max_concurrency < 1:
        raise UserError(f"max_concurrency must be at least 1, not {max_concurrency}")
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    start_s = time.monotonic()
    with tqdm(total=len(requests), unit="req", desc=about, disable=not progress) as bar:

        async def send(request: LoadRequest) -> RequestRecord:
            async with gate:
                record = await _send_one(target, request, start_s)
            bar.update()
            return record

        async with asyncio.TaskGroup() as group:
            tasks = {}
            for index in sorted(range(len(requests)), key=lambda i: requests[i].arrival_s):
                # Counted from the start each time, so that late wake-ups do not add up.
                delay_s = start_s + requests[index].arrival_s - time.monotonic()
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                tasks[index] = group.create_task(send(requests[index]))
    return [tasks[index].result() for index in range(len(requests))]


async def _send_one(target: LoadTarget, request: LoadRequest, start_s: float) -> RequestRecord:
    chunks: list[TokenChunk] = []
    error: str | None = None
    sent_s = time.monotonic()
    try:
        async with aclosing(target.send(request)) as answer:
            async for chunk in answer:
                chunks.append(chunk)
    except (RequestFailed, UserError) as failure:
        error = str(failure)
    finished_s = time.monotonic()
    usage = next((chunk.usage for chunk in chunks if chunk.usage), None)
    pieces = [chunk for chunk in chunks if chunk.usage is None]
    times_s = token_times(pieces, usage.output_tokens if usage else None)
    if error is None and not times_s:
        error = "the answer ended without a single token"
    return RequestRecord(
        request_id=request.request_id,
        prompt_tokens=(usage and usage.prompt_tokens) or len(request.prompt_token_ids),
        arrival_s=request.arrival_s,
        sent_s=sent_s - start_s,
        finished_s=finished_s - start_s,
        token_times_s=tuple(when - start_s for when in times_s),
        output_token_ids=_token_ids(pieces),
        text="".join(chunk.text for chunk in pieces),
        error=error,
    )


def _token_ids(chunks: Sequence[TokenChunk]) -> tuple[int, ...] | None:
    if any(chunk.token_ids is None for chunk in chunks):
        return None
    return tuple(token for chunk in chunks for token in chunk.token_ids or ())


def token_times(chunks: Sequence[TokenChunk], num_tokens: int | None) -> list[float]:
    """The time of each token.

    Chunks with token ids give it exactly. Otherwise ``num_tokens``, the server's count, is distributed: a chunk with
    text has at least one token; empty chunks get one next (servers send them for tokens that are no complete
    character), earliest first; the rest is distributed in proportion to the text. Without a count, a chunk with text
    counts as a token. The first and the last time are always exact.
    """
    if all(chunk.token_ids is not None for chunk in chunks):
        return [chunk.received_s for chunk in chunks for _ in chunk.token_ids or ()]
    with_text = [i for i, chunk in enumerate(chunks) if chunk.text]
    if num_tokens is None:
        return [chunks[i].received_s for i in with_text]
    if num_tokens <= len(with_text):
        return _thinned([chunks[i].received_s for i in with_text], num_tokens)
    empty = [i for i, chunk in enumerate(chunks) if not chunk.text]
    holders = sorted(with_text + empty[: num_tokens - len(with_text)])
    counts = _shares([len(chunks[i].text) for i in holders], num_tokens - len(holders))
    return [chunks[i].received_s for i, extra in zip(holders, counts, strict=True) for _ in range(1 + extra)]


def _thinned(times_s: Sequence[float], count: int) -> list[float]:
    """Return ``count`` of the times, evenly, with the first and the last."""
    if count <= 1:
        return list(times_s[:count])
    return [times_s[i * (len(times_s) - 1) // (count - 1)] for i in range(count)]


def _shares(weights: Sequence[int], total: int) -> list[int]:
    """Split ``total`` into whole shares by weight (even when all are 0), rounding the running sum."""
    even = weights if any(weights) else [1] * len(weights)
    whole, shares, running, given = sum(even), [], 0, 0
    for weight in even:
        running += weight
        share = total * running // whole - given
        shares.append(share)
        given += share
    return shares
