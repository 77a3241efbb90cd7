"""Several steps of the same decodes at once, as one by one would leave them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import repeat

from floodplain.core.errors import InvariantError
from floodplain.core.sequence import Sequence
from floodplain.runtime.state import LoopState


def decode_ahead(state: LoopState, seqs: Seq[Sequence], token: int, ends_s: Seq[float]) -> None:
    """Give each sequence ``token`` in each of the steps that end at ``ends_s``.

    Blocks are sealed and allocated in the order of the steps. InvariantError if there are too few.
    """
    num_steps, block_tokens = len(ends_s), state.ledger.block_tokens
    at_boundary: list[list[tuple[Sequence, int]]] = [[] for _ in range(num_steps + 1)]  # with their tokens, by steps
    for seq in seqs:
        for place in range(-seq.num_computed % block_tokens, num_steps + 1, block_tokens):
            at_boundary[place].append((seq, seq.num_computed + place))
        seq.tokens.extend(repeat(token, num_steps))
        seq.lifecycle.token_times_s.extend(ends_s)
        seq.num_computed += num_steps
        seq.num_scheduled += num_steps
        seq.keys_for(seq.num_computed // block_tokens, block_tokens)
    for place, due in enumerate(at_boundary):
        if place:
            _seal(state, due)
        if place < num_steps:
            _grow(state, due)


def _seal(state: LoopState, due: Seq[tuple[Sequence, int]]) -> None:
    for seq, _ in due:
        state.ledger.seal(seq.blocks[seq.num_sealed], seq.keys[seq.num_sealed])
        seq.num_sealed += 1


def _grow(state: LoopState, due: Seq[tuple[Sequence, int]]) -> None:
    for seq, num_tokens in due:
        if num_tokens == len(seq.blocks) * state.ledger.block_tokens:
            blocks = state.ledger.allocate(1)
            if blocks is None:
                raise InvariantError("a decision stood although blocks are short")
            seq.blocks += blocks
            state.row_changes.add(seq.seq_id)
