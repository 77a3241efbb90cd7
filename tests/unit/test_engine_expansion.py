"""Places that ``--kv-expansion`` allows by model, pool and memory; if none, an error with the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.core.layer_places import LayerPlaces, every_place
from floodplain.engine.config import EngineConfig
from floodplain.engine.expansion import ExpansionPlan, count_blocks, place_for, plan_expansion
from floodplain.memory.kv_layout import KVLayout

BASE_BLOCKS, QUANTUM = 137, 16
MIB = 2**20


def plan(num_layers: int = 30, available: int = 2**34, base_blocks: int = BASE_BLOCKS, **flags: Any) -> ExpansionPlan:
    layout = KVLayout(num_layers=num_layers, block_tokens=16, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    config = EngineConfig(model="any", **flags)
    return plan_expansion(config, layout, base_blocks, QUANTUM, available)


def test_off_is_one_place_without_streams() -> None:
    off = plan()
    assert off.is_off and off.is_fixed and off.sure_blocks == off.most_blocks == BASE_BLOCKS


def test_a_factor_is_one_place_and_its_pool_is_sure() -> None:
    fixed = plan(kv_expansion="3")
    assert fixed.places == (LayerPlaces(30, 23, 3),) and not fixed.is_off
    assert fixed.sure_blocks == count_blocks(fixed.places[0], BASE_BLOCKS, QUANTUM) == 400
    assert fixed.most_blocks == 144 * 3


def test_auto_may_choose_what_copies_have_memory_for() -> None:
    much, little = plan(kv_expansion="auto"), plan(kv_expansion="auto", expansion_memory=64 * MIB)
    assert much.places[-1].num_streamed == 30 > little.places[-1].num_streamed > 4
    last = little.places[-1]
    needed = [one.num_streamed * (BASE_BLOCKS * 30 // one.num_arenas) * 12288 for one in (last, next_of(last))]
    assert needed[0] <= 64 * MIB < needed[1]
    assert much.places[0].num_streamed == 0 and much.sure_blocks == BASE_BLOCKS // QUANTUM * QUANTUM


def next_of(places: LayerPlaces) -> LayerPlaces:
    return LayerPlaces(places.num_layers, places.num_streamed + 1, places.num_slots)


def test_auto_takes_a_quarter_of_what_is_free() -> None:
    assert plan(kv_expansion="auto", available=256 * MIB) == plan(kv_expansion="auto", expansion_memory=64 * MIB)


def test_long_prompts_keep_the_pool_as_large_as_one_of_them() -> None:
    long = plan(kv_expansion="auto", long_prompts=True, max_model_len=6000)
    assert long.sure_blocks * 16 >= 6000
    fewer = LayerPlaces(30, long.places[0].num_streamed - 1, 3)
    assert count_blocks(fewer, BASE_BLOCKS, QUANTUM) * 16 < 6000


def test_a_small_model_streams_through_two_slots() -> None:
    assert {one.num_slots for one in plan(num_layers=3, kv_expansion="auto").places} == {2}


@given(st.integers(3, 90), st.floats(1.001, 45.0))
def test_the_places_for_a_wish_are_as_near_as_any(num_layers: int, expansion: float) -> None:
    if expansion > num_layers / 2:
        with pytest.raises(UserError, match=f"what {num_layers} layers allow"):
            place_for(expansion, num_layers)
        return
    found = place_for(expansion, num_layers)
    assert found.num_streamed
    for num_slots in (2, 3):
        for other in every_place(num_layers, num_slots):
            if other.num_streamed:
                assert _distance(found, expansion) <= _distance(other, expansion) + 1e-12
                assert found.num_slots == 3 or other.num_slots == 2 or other.expansion != found.expansion


def _distance(places: LayerPlaces, expansion: float) -> float:
    return max(places.expansion / expansion, expansion / places.expansion)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"kv_expansion": "16"},
            "^--kv-expansion 16 is beyond what 30 layers allow: at most 15 [(]two slots[)]$",
        ),
        (
            {"num_layers": 1, "kv_expansion": "auto"},
            "^--kv-expansion auto needs a model of at least 3 layers, and this one has 1: leave it out$",
        ),
        (
            {"kv_expansion": "4", "expansion_memory": 64 * MIB},
            r"^--kv-expansion 4 needs 150\.3 MiB of host memory for the copies of 25 layers, and 64 MiB may be taken",
        ),
        (
            {"kv_expansion": "4", "available": 2**20},
            r"^--kv-expansion 4 needs 150\.3 MiB of host memory for the copies of 25 layers, and 1 MiB may be taken",
        ),
        (
            {"kv_expansion": "auto", "expansion_memory": MIB},
            "^--kv-expansion auto needs .* of host memory for 4 layers, and may take 1 MiB: raise --expansion-memory",
        ),
        (
            {"kv_expansion": "auto", "long_prompts": True, "max_model_len": 50_000},
            "^--max-model-len 50000 does not fit: expanded, the KV pool holds 21760 tokens; raise --kv-memory or",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(**kwargs)
