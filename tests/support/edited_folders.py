"""A folder of a tiny model whose ``config.json`` is edited; compares our logits with transformers'."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from floodplain.core.errors import UserError
from floodplain.model.network.load import load_decoder
from floodplain.model.weights.hf_folder import HfFolder
from tests.support.decoding import BLOCK_TOKENS, all_logits

MISSING = object()
"""The value of a key that is removed."""
TOLERANCE = 1e-3


class EditedFolder:
    """A model of transformers with random weights, and the ``config.json`` that ``save_pretrained`` wrote.

    Args:
        folder: Where it is saved.
        config: The model's configuration.

    Attributes:
        config: The mapping that was written.
    """

    def __init__(self, folder: Path, config: Any) -> None:
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3, mean=1.0 if parameter.dim() == 1 else 0.0)
        model.save_pretrained(folder)
        self._folder = folder
        self._tokens = torch.randint(3, config.vocab_size, (48,), generator=torch.Generator().manual_seed(1)).tolist()
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())

    def fault_of(self, changes: Mapping[str, Any], name: str) -> str | None:
        """Return the fault of our logits for changed keys; None if they equal transformers' or a refusal has ``name``.

        Args:
            changes: Keys by path (``rope_parameters.factor``), with their new values.
            name: The key that a refusal must name.
        """
        (self._folder / "config.json").write_text(json.dumps(_edited(self.config, changes)))
        ours = self._ours()
        if isinstance(ours, str):
            return None if name in ours else f"{dict(changes)}: refused without naming {name}: {ours}"
        try:
            theirs = self._theirs(len(ours))
        except Exception as error:  # any error of a folder that it cannot load
            return f"{dict(changes)}: loaded, and transformers refuses it: {type(error).__name__}: {error}"
        distance = float((ours - theirs).abs().max())
        return None if distance < TOLERANCE else f"{dict(changes)}: dropped in silence, logits differ by {distance}"

    def unused_tensors(self) -> list[str]:
        """Return tensors of the checkpoint whose change does not change our logits."""
        (self._folder / "config.json").write_text(json.dumps(self.config))
        file = self._folder / "model.safetensors"
        stored, usual = load_file(file), self._ours()
        assert isinstance(usual, torch.Tensor), usual
        unused = []
        for name, tensor in stored.items():
            save_file({**stored, name: tensor.flip(0) * 1.5}, file)
            ours = self._ours()
            if isinstance(ours, torch.Tensor) and torch.allclose(ours, usual, rtol=0, atol=TOLERANCE):
                unused.append(name)
        save_file(stored, file)
        return unused

    def _ours(self) -> torch.Tensor | str:
        try:
            source = HfFolder(self._folder)
        except UserError as error:
            return str(error)
        model = load_decoder(
            source.config, source, dtype=torch.float32, device=torch.device("cpu"), block_tokens=BLOCK_TOKENS
        )
        return all_logits(model, self._tokens[: source.config.shape.max_position])

    def _theirs(self, num_tokens: int) -> torch.Tensor:
        model = transformers.AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([self._tokens[:num_tokens]])).logits[0]
        return logits


def _edited(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    edited: dict[str, Any] = deepcopy(dict(config))
    for path, value in changes.items():
        *parents, key = path.split(".")
        mapping = edited
        for parent in parents:
            mapping = mapping[parent]
        if value is MISSING:
            mapping.pop(key, None)
        else:
            mapping[key] = value
    return edited
