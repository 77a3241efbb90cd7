"""Checks of an instance's messages about requests: each raises ``WireError``, which ends its connection. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from floodplain.cluster.state.request_table import Entry
from floodplain.cluster.wire.group_messages import KvRow, Prepared
from floodplain.cluster.wire.messages import TokenRow
from floodplain.core.codec import WireError
from floodplain.core.plan import PromptLogprobs


def check_token(entry: Entry, row: TokenRow, max_model_len: int, vocab_size: int) -> None:
    """Check that a placed request may get the token of this row; the limits are those of its instance and model."""
    params, num_output = entry.request.params, len(entry.tokens)
    if entry.num_tokens >= max_model_len or (params.max_tokens is not None and num_output >= params.max_tokens):
        raise WireError("a request gains more tokens than it may have")
    top = () if row.logprobs is None else row.logprobs.top
    if max((token for token, _ in top), default=0) >= vocab_size or (row.token or 0) >= vocab_size:
        raise WireError("a token is not in the vocabulary")
    if row.num_cached_tokens > entry.num_tokens:
        raise WireError("a request has more cached tokens than tokens")
    if row.prompt_logprobs is not None:
        _check_scores(entry, row.prompt_logprobs, vocab_size)
    elif params.prompt_logprobs is not None and not num_output:
        raise WireError("a prompt comes without the log-probabilities that were asked for")
    if params.logprobs is not None and (row.logprobs is None or len(top) > params.logprobs):
        raise WireError("a token comes without the log-probabilities that were asked for")


def _check_scores(entry: Entry, scores: PromptLogprobs, vocab_size: int) -> None:
    request = entry.request
    num_top = request.params.prompt_logprobs
    if num_top is None or len(scores) not in (0, len(request.prompt_token_ids) - 1):
        raise WireError("a prompt has other log-probabilities than were asked for")
    if any(len(one.top) > num_top or any(token >= vocab_size for token, _ in one.top) for one in scores):
        raise WireError("a token of a prompt has log-probabilities that were not asked for")


def check_rows(rows: Sequence[KvRow], integers: Sequence[int], least: int, most: int) -> None:
    """Check the rows of a group member, and their blocks or sources: at least ``least``, and below ``most``."""
    tickets = {row.ticket for row in rows}
    if len(tickets) < len(rows) or any(row.num_computed > row.num_tokens for row in rows):
        raise WireError("a request is there twice, or has more KV than tokens")
    if sum(row.num_blocks for row in rows) != len(integers):
        raise WireError("requests have other blocks than there are")
    check_blocks(integers, least, most)


def check_blocks(integers: Collection[int], least: int, most: int) -> None:
    """Check that block ids or sources are at least ``least`` and below ``most``."""
    if integers and not least <= min(integers) <= max(integers) < most:
        raise WireError("a block is named that is not there")


def check_report(
    report: Prepared, integers: Sequence[int], num_layers: int, others: Iterable[tuple[Prepared, object]]
) -> str | None:
    """Why a paused member cannot join those of ``others``; None if it can. ``integers`` are sources of its blocks."""
    if len(report.param_pages) != num_layers or not max(report.param_pages):
        raise WireError("a member has other layers than the model")
    if report.num_kv_pages < report.quantum_pages * num_layers:
        raise WireError("a member has no whole quantum")
    num_quanta = (report.num_kv_pages + sum(report.param_pages)) // report.quantum_pages
    check_rows(report.rows, integers, -(2**31), num_quanta * report.quantum_blocks)
    quantum = report.quantum_blocks, report.quantum_pages
    differs = any((one.quantum_blocks, one.quantum_pages) != quantum for one, _ in others)
    return "it divides its pool otherwise than the others: start all with the same flags" if differs else None


def check_moves(num_moves: int, integers: Sequence[int], num_quanta: int, quantum_blocks: int) -> None:
    """Check a leader's plan of a shrink: ``num_moves`` pairs of blocks, then the quanta to unmap."""
    moved, quanta = integers[: 2 * num_moves], integers[2 * num_moves :]
    if len(moved) < 2 * num_moves or len(set(moved)) < len(moved) or len(set(quanta)) < len(quanta):
        raise WireError("moves of a shrink are not whole, or one block moves twice")
    check_blocks(moved, 0, num_quanta * quantum_blocks)
    check_blocks(quanta, 0, num_quanta)
