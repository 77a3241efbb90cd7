from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from floodplain.core.errors import UserError
from floodplain.cost.model_shape import SHAPES, shape_named

SHARED = Path(os.environ.get("FLOODPLAIN_SHARED", Path(__file__).parents[3] / "shared"))
DERIVED = {
    "params": lambda shape: shape.num_params,
    "params_per_layer": lambda shape: shape.layer_params,
    "ffn_matrices": lambda shape: shape.num_ffn_matrices,
    "param_bytes_fp16": lambda shape: shape.param_bytes(2),
    "layer_bytes_fp16": lambda shape: shape.layer_bytes(2),
    "kv_bytes_per_token_fp16": lambda shape: shape.kv_bytes_per_token(2),
}


def _published() -> dict[str, dict[str, Any]]:
    path = SHARED / "data" / "models.json"
    if not path.is_file():
        pytest.skip(f"no published shapes at {path}; set FLOODPLAIN_SHARED")
    return dict(json.loads(path.read_text()))


def test_every_published_shape_and_every_derived_number_agrees() -> None:
    for name, facts in _published().items():
        shape = shape_named(name)
        for key, value in facts.items():
            if key in DERIVED:
                assert DERIVED[key](shape) == value, (name, key)
            elif key != "source":
                assert getattr(shape, key) == value, (name, key)


@pytest.mark.parametrize(
    ("name", "num_params", "kv_bytes"),
    [
        ("llama-3.1-8b", 8_030_261_248, 131_072),
        ("smollm2-135m", 134_515_008, 23_040),
        ("opt-13b", 12_853_473_280, 819_200),
    ],
)
def test_well_known_sizes(name: str, num_params: int, kv_bytes: int) -> None:
    shape = shape_named(name)
    assert (shape.num_params, shape.kv_bytes_per_token()) == (num_params, kv_bytes)


def test_names_are_lower_case_and_found_in_any_case() -> None:
    assert all(name == name.lower() == shape.name for name, shape in SHAPES.items())
    assert shape_named("Llama-3.1-8B") is SHAPES["llama-3.1-8b"]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"'llama-9'; there are .*tiny-llama"):
        shape_named("llama-9")
