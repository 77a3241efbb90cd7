"""The smallest driver of a decoder: some sequences, no scheduler, a KV whose free slots are NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from floodplain.model.batch import ForwardBatch, PrefillSegment
from floodplain.model.network.decoder import Decoder, LayerHooks

BLOCK_TOKENS = 4


class Sequences:
    """Some sequences of up to ``max_tokens`` tokens each, with scattered blocks."""

    def __init__(self, model: Decoder, num_sequences: int, max_tokens: int, seed: int = 0) -> None:
        shape = model.config.shape
        blocks_each = -(-max_tokens // BLOCK_TOKENS)
        shuffled = torch.randperm(num_sequences * blocks_each, generator=torch.Generator().manual_seed(seed))
        self._model = model
        self._tables = shuffled.view(num_sequences, blocks_each).to(model.device)
        size = (num_sequences * blocks_each, 2, BLOCK_TOKENS, shape.num_kv_heads, shape.head_dim)
        self.kv_layers = [
            torch.full(size, torch.nan, dtype=model.dtype, device=model.device) for _ in range(shape.num_layers)
        ]
        self.lengths = [0] * num_sequences
        self.hooks: LayerHooks | None = None

    def run(self, decodes: Sequence[tuple[int, int]], chunks: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor:
        """Run one step: (sequence, token) decodes, then (sequence, tokens) chunks. Returns logits of every row."""
        return self._model.forward(self.next_batch(decodes, chunks), self.kv_layers, self.hooks)

    def next_batch(
        self, decodes: Sequence[tuple[int, int]], chunks: Sequence[tuple[int, Sequence[int]]]
    ) -> ForwardBatch:
        """Return the batch of a step; the step counts as done."""
        rows = [(seq, [token]) for seq, token in decodes] + [(seq, list(tokens)) for seq, tokens in chunks]
        token_ids, positions, slots, segments = [], [], [], []
        for index, (seq, tokens) in enumerate(rows):
            start, end = self.lengths[seq], self.lengths[seq] + len(tokens)
            where = torch.arange(start, end, device=self._model.device)
            if index >= len(decodes):
                segments.append(PrefillSegment(len(token_ids), len(tokens), end, self._tables[seq]))
            token_ids += tokens
            positions.append(where)
            slots.append(self._tables[seq, where // BLOCK_TOKENS] * BLOCK_TOKENS + where % BLOCK_TOKENS)
            self.lengths[seq] = end
        contexts = [self.lengths[seq] for seq, _ in decodes]
        device = self._model.device
        return ForwardBatch(
            token_ids=torch.tensor(token_ids, device=device),
            positions=torch.cat(positions),
            slot_mapping=torch.cat(slots),
            block_tables=self._tables[[seq for seq, _ in decodes]],
            context_lens=torch.tensor(contexts, dtype=torch.int64, device=device),
            max_context_len=max(contexts, default=0),
            prefills=tuple(segments),
            logits_rows=torch.arange(len(token_ids), device=device),
        )


def all_logits(model: Decoder, token_ids: Sequence[int], chunk_tokens: int | None = None) -> torch.Tensor:
    """Return logits [len(token_ids), vocab]: in chunks of ``chunk_tokens`` (1: by decoding), or all at once."""
    step = chunk_tokens or len(token_ids)
    sequences = Sequences(model, 1, len(token_ids))
    pieces = [list(token_ids[begin : begin + step]) for begin in range(0, len(token_ids), step)]
    if step == 1:
        return torch.cat([sequences.run([(0, piece[0])], []) for piece in pieces])
    return torch.cat([sequences.run([], [(0, piece)]) for piece in pieces])
