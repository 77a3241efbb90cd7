"""The shape of a model from its configuration alone: reads no weights, and imports no tensor library."""

from __future__ import annotations

from pathlib import Path

from floodplain.core.errors import UserError
from floodplain.cost.model_shape import ModelShape, shape_named
from floodplain.files.parsing import parsing, read_json_object
from floodplain.files.reading import is_file, is_folder
from floodplain.model.tokenizer_view import VOCABULARIES
from floodplain.model.weights.places import packaged_smollm2, unknown_model


def peek_shape(model: str) -> ModelShape:
    """The shape of the model that ``open_model`` would open.

    Raises:
        UserError: There is no such model, or its configuration is missing, unreadable or not supported.
    """
    if model.startswith("dummy:"):
        return shape_named(model.removeprefix("dummy:"))
    path = packaged_smollm2() if model == "smollm2" else Path(model)
    if is_folder(path):
        return _shape_of_folder(path)
    if path.suffix == ".gguf" and is_file(path):
        return _shape_of_gguf(path, "smollm2" if model == "smollm2" else path.stem)
    raise unknown_model(model)


def _shape_of_folder(folder: Path) -> ModelShape:
    from floodplain.model.network.hf_config import parse_hf_config

    path = folder / "config.json"
    if not is_file(path):
        raise UserError(f"{path} is missing; MODEL must be a folder with a complete Hugging Face model")
    if not any(is_file(folder / file) for file in VOCABULARIES):
        raise UserError(f"{folder}: the tokenizer is missing; one of {', '.join(VOCABULARIES)} must be there")
    content = read_json_object(path)
    with parsing(path):
        return parse_hf_config(content, folder.resolve().name, str(path)).shape


def _shape_of_gguf(path: Path, name: str) -> ModelShape:
    from floodplain.model.weights.gguf_config import parse_gguf_config
    from floodplain.model.weights.gguf_parts import GgufParts

    with parsing(path):
        parts = GgufParts(path)
        return parse_gguf_config(parts.fields, parts.stored(), (), name).shape
