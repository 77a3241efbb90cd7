"""What the data sheet says of a step, and of the memory for KV."""

from __future__ import annotations

from dataclasses import replace

import pytest

from floodplain.core.errors import UserError
from floodplain.cost.devices import DEVICES, AllReduce, Roofline, device_named, predict_blocks
from floodplain.cost.fits import _FITS, fit_of
from floodplain.cost.model_shape import SHAPES, shape_named
from floodplain.model.weights.open_model import DummyModel

LLAMA = shape_named("llama-3.1-8b")
CARD = DEVICES["rtx4090"]
COST = Roofline(LLAMA, CARD)


def blocks(**changes: object) -> int:
    settings = {"utilisation": 0.9, "max_num_seqs": 256, "max_batched_tokens": 2048} | changes
    return predict_blocks(LLAMA, CARD, **settings)  # type: ignore[arg-type]


def test_the_pool_of_a_real_server_is_predicted() -> None:
    assert blocks() == pytest.approx(2587, abs=4)  # vLLM 0.19 on an RTX 4090: 2,588, of which one is the null block


def test_the_pool_shrinks_with_what_else_takes_memory() -> None:
    assert blocks(utilisation=0.95) > blocks() > blocks(max_num_seqs=512)
    assert blocks(block_tokens=32) * 2 == pytest.approx(blocks(), abs=3)
    halves = predict_blocks(LLAMA, CARD, utilisation=0.9, max_num_seqs=256, max_batched_tokens=2048, num_shards=2)
    assert halves > 2 * blocks()  # half the weights, and half of each block


def test_a_model_that_does_not_fit_is_refused_with_the_bytes() -> None:
    with pytest.raises(
        UserError, match=r"llama-3.1-70b does not fit on 1 x rtx4090: of 22.7 GB each, weights take 141"
    ):
        predict_blocks(shape_named("llama-3.1-70b"), CARD, utilisation=0.9, max_num_seqs=256, max_batched_tokens=2048)


def test_a_lone_decode_reads_all_weights_but_the_embedding() -> None:
    table = LLAMA.vocab_size * LLAMA.hidden_size
    read_bytes = 2 * (LLAMA.num_params - table)
    least_s = read_bytes / CARD.bandwidth
    assert least_s < COST.batch_s([1], [], 1) < 1.5 * least_s


def test_a_long_prompt_is_bound_by_arithmetic() -> None:
    least_s = 2 * 2048 * LLAMA.num_layers * LLAMA.layer_params / CARD.flops
    assert least_s < COST.batch_s([], [(0, 2048)], 1) < 2.5 * least_s


def test_more_work_never_costs_less() -> None:
    for contexts, chunks in (([10], []), ([10, 900], []), ([], [(0, 64)]), ([500] * 30, [(100, 300)])):
        here = COST.batch_s(contexts, chunks, len(contexts))
        assert COST.batch_s([*contexts, 200], chunks, len(contexts)) >= here
        assert COST.batch_s(contexts, [*chunks, (0, 16)], len(contexts)) >= here
    assert COST.batch_s([], [], 0) == 0.0


def test_two_gpus_are_faster_and_pay_for_collectives() -> None:
    batch = ([500] * 30, [(0, 500)], 31)
    one, two = COST.batch_s(*batch), replace(COST, num_shards=2).batch_s(*batch)
    assert one / 2 < two < one


def test_gpus_beyond_the_kv_heads_hold_and_read_the_same_ones() -> None:
    """Twice as many GPUs halve the weights of each, and neither the KV of a token there nor the time to read it."""
    settings = {"utilisation": 0.9, "max_num_seqs": 256, "max_batched_tokens": 2048}
    eight, sixteen = (predict_blocks(LLAMA, CARD, num_shards=n, **settings) for n in (8, 16))  # type: ignore[arg-type]
    assert LLAMA.kv_bytes_per_token(2, 16) == LLAMA.kv_bytes_per_token(2, 8) == LLAMA.kv_bytes_per_token(2) // 8
    saved_bytes = LLAMA.param_bytes(2) / 16 + 2048 * 3 * LLAMA.ffn_size / 16 * 2
    assert sixteen - eight <= saved_bytes / (16 * LLAMA.kv_bytes_per_token(2, 8)) + 1
    read_s = [
        cost.batch_s([9000] * 9, [], 9) - cost.batch_s([1] * 9, [], 9)
        for cost in (replace(COST, num_shards=n) for n in (8, 16))
    ]
    assert read_s[0] == pytest.approx(read_s[1])


def test_an_unknown_device_is_refused_with_all_names() -> None:
    with pytest.raises(UserError, match="no device is called 'rtx9000'; there are a100-40gb"):
        device_named("rtx9000")


def test_fits_are_of_known_devices_and_models_and_near_their_roofline() -> None:
    for device, model, num_shards in _FITS:
        fit = fit_of(device, model, num_shards)
        sheet = Roofline(SHAPES[model], DEVICES[device], num_shards)
        assert fit is not None
        for contexts, chunks in (([500] * 8, []), ([500] * 30, []), ([], [(0, 1500)])):
            batch = (contexts, chunks, len(contexts) + len(chunks))
            assert fit.cost.batch_s(*batch) == pytest.approx(sheet.batch_s(*batch), rel=0.4)
    assert fit_of("h200", "llama-3.1-8b", 1) is None


def test_a_mixture_of_experts_stores_all_and_computes_with_few() -> None:
    moe = shape_named("qwen3-30b-a3b")
    assert moe.num_params == pytest.approx(30.5e9, rel=0.01)  # as published; 3.3e9 of them for each token
    assert [moe.count_active_experts(tokens) for tokens in (1, 10_000)] == pytest.approx([8, 128])
    cost = Roofline(moe, DEVICES["h200"])
    one_s, many_s = cost.batch_s([1], [], 1), cost.batch_s([1] * 64, [], 64)
    assert 2 * 3e9 / DEVICES["h200"].bandwidth < one_s < 0.2 * 2 * 30e9 / DEVICES["h200"].bandwidth + 48 * 40e-6
    assert many_s > 3 * (one_s - 48 * 40e-6)  # nearly all experts are read
    with pytest.raises(UserError, match="has experts, which are simulated only"):
        DummyModel("qwen3-30b-a3b")


def test_a_sum_over_gpus_costs_its_latency_and_the_bytes_of_a_ring() -> None:
    ring = AllReduce(latency_s=1e-5, bandwidth=1e11)
    assert ring.time_s(1e6, 1) == 0.0
    assert ring.time_s(1e6, 2) == pytest.approx(2e-5)
    assert ring.time_s(1e6, 4) == pytest.approx(2.5e-5)
