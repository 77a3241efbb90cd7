"""Former module names can still be imported: users' scripts need them."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize("name", ["open_model", "gguf_file"])
def test_weights_are_found_by_their_former_name(name: str) -> None:
    former = importlib.import_module(f"floodplain.engine.weights.{name}")
    assert former is importlib.import_module(f"floodplain.model.weights.{name}")
