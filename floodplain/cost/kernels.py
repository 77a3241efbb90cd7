"""The time of a step as the sum of its kernels' measured times, by straight lines between measured sizes.

A step is, for each layer, dense kernels over all of its tokens and one attention kernel over its batch, and once the
embedding, the last norm, and the output projection and the sampler for each sampled token. The tables have the columns
of LLMServingSim's profiler (casys-kaist/LLMServingSim, MIT licence), times in microseconds.

Not in the tables: the attention of decodes of mixed lengths costs what their mean context costs; dense kernels run at
the next larger size of a captured graph; decodes beside a prompt run in a slower kernel than alone, so a mixed step is
looked up with its largest chunk, and each further chunk adds its own time without the launch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

import numpy as np
from numpy import typing as npt

from floodplain.core.errors import UserError

PER_LAYER: Mapping[str, int] = {
    "layernorm": 2, "qkv_proj": 1, "qk_norm": 1, "rotary_emb": 1, "o_proj": 1, "gate_up_proj": 1, "act_fn": 1,
    "down_proj": 1, "moe": 1, "all_reduce": 2,
}  # fmt: skip
"""How often each dense kernel runs in a layer: all experts of its tokens, and sums over GPUs, among them."""
ONCE = ("embedding", "final_layernorm")
MAX_TOKENS = 2**14
"""Most tokens of a step, and most sequences: beyond the measured sizes the last slope is continued."""
_NO_DECODE_TOP = 1.5
"""Beyond the last point of a mixed step's axis, a line is continued for at most half of its last segment."""

_NOTHING = np.zeros(MAX_TOKENS + 1)

FloatArray = npt.NDArray[np.float64]
Line = Mapping[int, float]
"""Seconds by size."""
Key = tuple[int, int, int, int]
"""(tokens of a chunk, tokens before it, number of decodes, their context), each 0 if there is none."""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Sizes of CUDA graphs that vLLM captures: 1, 2, 4, by 8 to 256, by 16 to 512 or twice ``max_num_seqs``."""
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    return tuple(size for size in sizes if size <= 2 * max_num_seqs)


class KernelCost:
    """Seconds of a step by its batch.

    Args:
        num_layers: Of the model.
        dense: Seconds by number of tokens of each kernel of ``PER_LAYER`` and ``ONCE``; others are not used.
        attention: Seconds of one layer's attention.
        per_sequence: Seconds by number of sampled tokens, of each kernel.
        overhead_s: Added to each step: what the host and launches take beside kernels.
        graphs: Sizes of captured graphs, rising; up to the largest, the tokens of a step are padded.

    UserError if a table lacks what every step needs.
    """

    def __init__(
        self,
        num_layers: int,
        dense: Mapping[str, Line],
        attention: Mapping[Key, float],
        per_sequence: Mapping[str, Line],
        *,
        overhead_s: float = 0.0,
        graphs: Sequence[int] = (),
    ) -> None:
        if missing := [name for name in ("qkv_proj", "o_proj", *ONCE) if name not in dense]:
            raise UserError(f"the table of dense kernels lacks {', '.join(missing)}")
        layer = sum((PER_LAYER[name] * _curve(name, dense[name]) for name in PER_LAYER if name in dense), _NOTHING)
        self._dense_s: list[float] = (num_layers * layer + sum(_curve(name, dense[name]) for name in ONCE)).tolist()
        self._sampled_s: list[float] = sum((_curve(*each) for each in per_sequence.items()), _NOTHING).tolist()
        self._attention = _AttentionTimes(attention)
        self._num_layers, self._overhead_s, self._graphs = num_layers, overhead_s, list(graphs)

    def batch_s(self, contexts: Sequence[int], chunks: Sequence[tuple[int, int]], num_sampled: int) -> float:
        """As ``step_time.BatchCost``."""
        num_tokens = len(contexts) + sum(tokens for _, tokens in chunks)
        if not num_tokens:
            return 0.0
        place = bisect_left(self._graphs, num_tokens)
        padded = self._graphs[place] if place < len(self._graphs) else num_tokens
        attention_s = self._num_layers * self._attention.time_s(contexts, chunks)
        return self._dense_s[padded] + attention_s + self._sampled_s[num_sampled] + self._overhead_s


def _curve(name: str, line: Line) -> FloatArray:
    """Seconds for 0 to ``MAX_TOKENS``, by straight lines; the slope of the upper half continues beyond the last."""
    sizes = sorted(line)
    if len(sizes) < 2:
        raise UserError(f"a table of kernels needs at least two sizes of each, and has {len(sizes)} of {name}")
    every = np.arange(MAX_TOKENS + 1)
    last, middle = sizes[-1], sizes[len(sizes) // 2 - (len(sizes) == 2)]
    slope = max(0.0, (line[last] - line[middle]) / (last - middle))
    inside = np.interp(every, sizes, [line[size] for size in sizes])
    return np.asarray(np.where(every > last, line[last] + slope * (every - last), inside))


class _AttentionTimes:
    """One layer's attention, between the corners of the measured grid."""

    def __init__(self, times: Mapping[Key, float]) -> None:
        mixed = [key for key in times if key[0] and key[2]]
        axes = [_powers(key[axis] for key in mixed) for axis in range(4)]  # other points are there in few combinations
        prompts = {(key[0], key[1]): time for key, time in times.items() if key[0] and not key[2]}
        decodes = {(key[2], key[3]): time for key, time in times.items() if key[2] and not key[0]}
        counts = sorted({count for count, _ in decodes})
        if not prompts or min(map(len, (*axes, counts))) < 2:
            raise UserError("the table of attention needs chunks alone, decodes alone, and both, at two sizes each")
        self._axes, self._corners = axes, dict(times)
        self._prompts = _Grid(axes[0], axes[1], prompts)
        self._decodes = _Grid(counts, axes[3], decodes)
        self._launch_s = min(prompts.values())

    def time_s(self, contexts: Sequence[int], chunks: Sequence[tuple[int, int]]) -> float:
        if not chunks:
            return self._decodes.at(len(contexts), sum(contexts) / len(contexts))
        if not contexts:
            return sum(self._prompts.at(tokens, before) for before, tokens in chunks)
        largest = max(range(len(chunks)), key=lambda place: chunks[place][1])
        before, tokens = chunks[largest]
        others = (self._prompts.at(n, p) - self._launch_s for place, (p, n) in enumerate(chunks) if place != largest)
        return self._mixed_s((tokens, before, len(contexts), sum(contexts) / len(contexts))) + sum(others)

    def _mixed_s(self, where: tuple[float, ...]) -> float:
        """A chunk beside decodes, by straight lines along all four axes."""
        places = [_between(axis, value) for axis, value in zip(self._axes, where, strict=True)]
        total = 0.0
        for corner in product((0, 1), repeat=4):
            weight = 1.0
            for side, (_, part) in zip(corner, places, strict=True):
                weight *= part if side else 1 - part
            if weight:
                key = [axis[low + side] for side, axis, (low, _) in zip(corner, self._axes, places, strict=True)]
                total += weight * self._corner_s((key[0], key[1], key[2], key[3]))
        return total

    def _corner_s(self, key: Key) -> float:
        """A corner of the grid. A missing one follows the line through half and a quarter of its decodes."""
        known = self._corners.get(key)
        if known is None:
            chunk, before, count, context = key
            half = self._corners.get((chunk, before, count // 2, context))
            quarter = self._corners.get((chunk, before, count // 4, context))
            if half is not None and quarter is not None:
                known = half + 2 * (half - quarter)
            else:
                known = self._prompts.at(chunk, before) + self._decodes.at(count, context)
            self._corners[key] = known
        return known


class _Grid:
    """Times over two axes, bilinear; holes continue the row's ratio, else twice the row before."""

    def __init__(self, rows: Sequence[int], columns: Sequence[int], times: Mapping[tuple[int, int], float]) -> None:
        self._rows, self._columns = rows, columns
        self._table: list[list[float]] = []
        for row in rows:
            line: list[float] = []
            for place, column in enumerate(columns):
                known = times.get((row, column))
                if known is None and place >= 2:
                    known = line[-1] * max(1.0, line[-1] / line[-2])
                elif known is None:
                    known = 2 * self._table[-1][place] if self._table else min(times.values())
                line.append(known)
            self._table.append(line)

    def at(self, row: float, column: float) -> float:
        """The time at a place; below the grid the first point counts.

        Beyond it the last segment continues, and a time is at least that at the edge.
        """
        i, u = _between(self._rows, row, most=float("inf"))
        j, v = _between(self._columns, column, most=float("inf"))
        inside = self._mix(i, j, min(u, 1.0), min(v, 1.0))
        return inside if u <= 1 and v <= 1 else max(inside, self._mix(i, j, u, v))

    def _mix(self, i: int, j: int, u: float, v: float) -> float:
        low, high = self._table[i], self._table[i + 1]
        return (1 - u) * ((1 - v) * low[j] + v * low[j + 1]) + u * ((1 - v) * high[j] + v * high[j + 1])


def _between(axis: Sequence[int], value: float, most: float = _NO_DECODE_TOP) -> tuple[int, float]:
    """(index of the point below, part of the way to the next one), the part at least 0 and at most ``most``."""
    low = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    part = (value - axis[low]) / (axis[low + 1] - axis[low])
    return low, min(max(part, 0.0), most)


def _powers(values: Iterable[int]) -> list[int]:
    return sorted({value for value in values if value & (value - 1) == 0})
