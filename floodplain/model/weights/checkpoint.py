"""Matches a checkpoint's tensors with a model's parameters: each tensor is read, known as harmless, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from floodplain.core.errors import UserError
from floodplain.cost.model_shape import ModelShape
from floodplain.model.network.config import ModelConfig

_MOST_SHOWN = 120


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file's table of contents: file, sizes with rows first, and data type by the file's own name."""

    file: str
    shape: tuple[int, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class Format:
    """The differences between formats of checkpoints.

    Attributes:
        config: The name of the configuration, for messages.
        names: The names under which a parameter may be stored, by its name in a HF checkpoint.
        harmless: Tensors that change no logit.
        is_plain: Whether a data type, by the file's name, can be read.
        layer: A tensor of a layer; its group is the index.
        size_keys: The keys that determine each size of a tensor.
        tensor_keys: The keys that determine whether tensors with some names exist.
    """

    config: str
    names: Callable[[str], tuple[str, ...]]
    harmless: re.Pattern[str]
    is_plain: Callable[[str], bool]
    layer: re.Pattern[str]
    layers_key: str
    size_keys: Mapping[str, Callable[[ModelShape], int]]
    tensor_keys: Mapping[str, re.Pattern[str]]


def match_tensors(config: ModelConfig, stored: Mapping[str, StoredTensor], form: Format, model: str) -> dict[str, str]:
    """The stored name of every parameter, by its name in a HF checkpoint. ``model`` is its place, for messages.

    Raises UserError, which names the tensor, if a parameter is missing or has another shape, or a tensor is not read.
    """
    from floodplain.model.network.load import parameter_parts  # imports torch, which reading a shape does not need

    for name, tensor in stored.items():
        if not form.harmless.fullmatch(name) and not form.is_plain(tensor.kind):
            raise UserError(
                f"{tensor.file}: {name[:_MOST_SHOWN]!r} has the data type {tensor.kind}, which is not supported; "
                "use a .gguf file or unquantised weights"
            )
    found = {}
    for part in parameter_parts(config):
        names = [name for name in form.names(part.name) if name in stored]
        if not names:
            _refuse_missing(form.names(part.name)[0], stored, config, form, model)
        _check_shape(names[0], stored[names[0]], part.shape, config.shape, form)
        found[part.name] = names[0]
    _refuse_unread(stored, set(found.values()), config.shape, form)
    return found


def _check_shape(name: str, tensor: StoredTensor, wanted: tuple[int, ...], shape: ModelShape, form: Format) -> None:
    if tensor.shape == wanted:
        return
    wrong = [size for size, other in zip(wanted, tensor.shape, strict=False) if size != other]
    keys = [key for key, size_of in form.size_keys.items() if size_of(shape) in wrong]
    why = f" ({' or '.join(keys)})" if keys else ""
    raise UserError(f"{tensor.file}: {name} has shape {tensor.shape}, {form.config} says {wanted}{why}")


def _refuse_unread(stored: Mapping[str, StoredTensor], read: set[str], shape: ModelShape, form: Format) -> None:
    rest = [name for name in stored if name not in read and not form.harmless.fullmatch(name)]
    if not rest:
        return
    name, more = rest[0], f" and {len(rest) - 1} more" if len(rest) > 1 else ""
    layer = form.layer.match(name)
    if layer is not None and int(layer[1]) >= shape.num_layers:
        why = f"{form.layers_key} is {shape.num_layers}"
    elif "scale" in name or "zero" in name:
        why = "quantised weights are not supported; use a .gguf file or unquantised weights"
    else:
        why = "no code reads it, so the model would be computed without it"
    raise UserError(
        f"{stored[name].file}: the tensor {name[:_MOST_SHOWN]!r}{more} is not supported: {why}{_said_by(name, form)}"
    )


def _refuse_missing(
    name: str, stored: Mapping[str, StoredTensor], config: ModelConfig, form: Format, model: str
) -> NoReturn:
    layer, prefixed = form.layer.match(name), next((one for one in stored if one.endswith(f".{name}")), None)
    if prefixed is not None:
        why = f", but {prefixed[:_MOST_SHOWN]!r}: remove the prefix from all names"
    elif layer is not None and not any(other.startswith(layer[0]) for other in stored):
        why = f" ({form.layers_key} is {config.shape.num_layers})"
    else:
        why = _said_by(name, form)
    raise UserError(f"{model}: the weights have no tensor {name!r}{why}")


def _said_by(name: str, form: Format) -> str:
    """A hint in parentheses: the key that determines whether tensor ``name`` exists; empty if there is none."""
    keys = [key for key, pattern in form.tensor_keys.items() if pattern.fullmatch(name)]
    return f" (see {keys[0]} in {form.config})" if keys else ""
