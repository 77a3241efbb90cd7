"""Steps priced by kernel tables: exact where the tables are straight, and by the stated rules elsewhere."""

from __future__ import annotations

from itertools import product

import pytest

from floodplain.core.errors import UserError
from floodplain.cost.kernels import KernelCost, graph_sizes

LAYERS = 3
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CHUNKS, PREFIXES, COUNTS, CONTEXTS = (16, 64, 256), (0, 16, 256, 1024), (1, 2, 4, 8, 16, 32, 64), (16, 256, 1024)
LAUNCH = 3e-6


def dense_s(tokens: float) -> float:
    return 2e-6 + 1e-7 * tokens


def prompt_s(chunk: float, before: float) -> float:
    return LAUNCH + 1e-7 * chunk + 2e-9 * before + 1e-10 * chunk * before


def decode_s(count: float, context: float) -> float:
    return LAUNCH + 1e-8 * count + 5e-10 * count * context


def mixed_s(chunk: float, before: float, count: float, context: float) -> float:
    """Linear along each axis, and more than both alone."""
    return prompt_s(chunk, before) + 3 * decode_s(count, context)


def tables() -> dict[tuple[int, int, int, int], float]:
    times = {(c, b, 0, 0): prompt_s(c, b) for c, b in product(CHUNKS, PREFIXES)}
    times |= {(0, 0, n, d): decode_s(n, d) for n, d in product(COUNTS, CONTEXTS)}
    return times | {key: mixed_s(*key) for key in product(CHUNKS, PREFIXES, COUNTS, CONTEXTS)}


DENSE = {
    name: {size: dense_s(size) for size in SIZES} for name in ("qkv_proj", "o_proj", "embedding", "final_layernorm")
}
SAMPLED = {"lm_head": {1: 5e-6, 2: 6e-6, 64: 68e-6}}


def make(**changes: object) -> KernelCost:
    parts = {"dense": DENSE, "attention": tables(), "per_sequence": SAMPLED} | changes
    return KernelCost(LAYERS, **parts)  # type: ignore[arg-type]


def expected_s(tokens: int, attention_s: float, num_sampled: int) -> float:
    return (2 * LAYERS + 2) * dense_s(tokens) + LAYERS * attention_s + (num_sampled * 1e-6 + 4e-6)


@pytest.mark.parametrize("contexts", [[100], [20, 900, 300], [16] * 64])
def test_decodes_cost_what_their_mean_context_does(contexts: list[int]) -> None:
    count, mean = len(contexts), sum(contexts) / len(contexts)
    wanted = expected_s(count, decode_s(count, mean), count)
    assert make().batch_s(contexts, [], count) == pytest.approx(wanted)


def test_prompts_alone_add_up() -> None:
    chunks = [(0, 100), (700, 40)]
    wanted = expected_s(140, prompt_s(100, 0) + prompt_s(40, 700), 1)
    assert make().batch_s([], chunks, 1) == pytest.approx(wanted)


def test_decodes_beside_a_prompt_run_in_the_kernel_of_the_mix() -> None:
    contexts, chunks = [300] * 10, [(30, 60), (0, 20)]
    attention_s = (
        mixed_s(60, 30, 10, 300) + prompt_s(20, 0) - min(tables()[c, b, 0, 0] for c in CHUNKS for b in PREFIXES)
    )
    got = make().batch_s(contexts, chunks, 11)
    assert got == pytest.approx(expected_s(90, attention_s, 11))
    assert got > make().batch_s(contexts, [], 10) + LAYERS * prompt_s(60, 30)  # not the sum of both alone


def test_a_missing_corner_of_the_mix_follows_its_decodes() -> None:
    times = tables()
    key = (64, 16, 64, 1024)
    del times[key]
    batch = ([1024] * 64, [(16, 64)], 65)
    assert make(attention=times).batch_s(*batch) == pytest.approx(make().batch_s(*batch))


def test_tokens_are_padded_to_captured_graphs() -> None:
    padded, exact = make(graphs=(1, 2, 4, 8, 16)), make()
    assert padded.batch_s([50] * 9, [], 9) - exact.batch_s([50] * 9, [], 9) == pytest.approx(
        (2 * LAYERS + 2) * (dense_s(16) - dense_s(9))
    )
    assert padded.batch_s([50] * 8, [], 8) == exact.batch_s([50] * 8, [], 8)  # a graph's own size
    assert padded.batch_s([], [(0, 100)], 1) == exact.batch_s([], [(0, 100)], 1)  # no graph is so large


def test_experts_run_once_a_layer_and_sums_over_gpus_twice() -> None:
    more = DENSE | {"moe": {1: 1e-5, 101: 2e-5}, "all_reduce": {1: 4e-6, 101: 8e-6}}
    extra_s = make(dense=more).batch_s([], [(0, 51)], 1) - make().batch_s([], [(0, 51)], 1)
    assert extra_s == pytest.approx(LAYERS * (1.5e-5 + 2 * 6e-6))


def test_overhead_is_once_a_step_and_an_empty_step_costs_nothing() -> None:
    slow = make(overhead_s=1e-3)
    assert slow.batch_s([50], [], 1) - make().batch_s([50], [], 1) == pytest.approx(1e-3)
    assert slow.batch_s([], [], 0) == 0.0


def test_beyond_the_tables_the_last_slope_continues() -> None:
    assert make().batch_s([], [(0, 1000)], 1) == pytest.approx(expected_s(1000, prompt_s(1000, 0), 1))


def test_a_last_segment_that_falls_makes_nothing_free_beyond_it() -> None:
    """Noise of the last two sizes, a hundred times farther out, is no negative time."""
    falling = tables() | {(0, 0, 64, context): decode_s(32, context) - 1e-6 for context in CONTEXTS}
    cost = make(attention=falling)
    edge_s, beyond_s = (cost.batch_s([500] * n, [], n) - expected_s(n, 0.0, n) for n in (64, 6400))
    assert beyond_s == pytest.approx(edge_s)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dense": {}}, "lacks qkv_proj, o_proj, embedding, final_layernorm"),
        ({"dense": {name: {1: 1e-6} for name in DENSE}}, "at least two sizes of each, and has 1 of qkv_proj"),
        ({"per_sequence": {"lm_head": {1: 5e-6}}}, "has 1 of lm_head"),
        ({"attention": {key: time for key, time in tables().items() if not key[2]}}, "decodes alone"),
        ({"attention": {key: time for key, time in tables().items() if key[0] or key[2] == 1}}, "at two sizes each"),
    ],
)
def test_tables_that_lack_something_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make(**changes)


def test_graph_sizes_are_those_of_vllm() -> None:
    assert graph_sizes(4) == (1, 2, 4, 8)
    assert graph_sizes(256)[-3:] == (480, 496, 512) and graph_sizes(10_000) == graph_sizes(256)
    assert [size for size in graph_sizes(256) if 240 <= size <= 290] == [240, 248, 256, 272, 288]
