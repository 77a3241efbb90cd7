"""The tokens of one forward pass: one token of some sequences (decodes), a run of tokens of others (prefills)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """A run of ``num_tokens`` consecutive tokens of one sequence, from row ``first_row`` of the batch on.

    ``context_len``: tokens of the sequence up to the end of the run. ``block_table``: the sequence's blocks, int64, at
    least those that hold ``context_len`` tokens.
    """

    first_row: int
    num_tokens: int
    context_len: int
    block_table: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The T tokens of one step: B decodes first, one row each, then the prefill segments in the order of their rows.

    All tensors are int64 on the model's device.

    Attributes:
        token_ids: [T].
        positions: [T], from 0 in each sequence.
        slot_mapping: [T], the slot of each token's key and value: ``block * block_tokens + offset``.
        block_tables: [B, max_blocks]; entries past a sequence's context may be any valid block.
        context_lens: [B], tokens of each decoding sequence including this one.
        max_context_len: The largest of ``context_lens``, known on the host; 0 without decodes.
        logits_rows: [S], the rows whose logits are computed.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    max_context_len: int
    prefills: tuple[PrefillSegment, ...]
    logits_rows: torch.Tensor

    @property
    def num_decodes(self) -> int:
        """B, the number of decode rows."""
        return self.context_lens.shape[0]
