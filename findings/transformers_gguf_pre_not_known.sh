#!/usr/bin/env bash
# transformers reads the tokenizer of a .gguf file whose tokenizer.ggml.pre it does not know, and splits texts as GPT-2
# does, without a word. Here: smollm, the name in every .gguf file of SmolLM2, which means digits one by one first.
# Exits with 0 as long as that is so.
set -euo pipefail
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
python3 -m venv "$FOLDER/venv"
"$FOLDER/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 tokenizers==0.23.3 \
    gguf==0.19.0 torch==2.13.0
cat > "$FOLDER/try.py" <<'PYTHON'
import sys
import warnings

import gguf
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

folder = sys.argv[1]
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokens = [*letters, "\u0120\u0120", "<|end|>"]
writer = gguf.GGUFWriter(f"{folder}/m.gguf", "llama")
writer.add_block_count(1)
writer.add_context_length(64)
writer.add_embedding_length(64)
writer.add_feed_forward_length(64)
writer.add_head_count(1)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("smollm")
writer.add_token_list(tokens)
writer.add_token_types([1] * (len(tokens) - 1) + [3])
writer.add_token_merges(["\u0120 \u0120"])
writer.add_eos_token_id(len(tokens) - 1)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.close()
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="m.gguf")
seen = tokenizer.convert_ids_to_tokens(tokenizer.encode("a  1", add_special_tokens=False))
wanted = ["a", "\u0120\u0120", "1"]  # the digit is split off first, so that the two blanks are one word and one token
about = [str(one.message) for one in said if "smollm" in str(one.message)]
print("transformers", transformers.__version__)
print("expected:", wanted, "or a refusal or a warning that names smollm")
print("seen:    ", seen, "warnings that name it:", about)
sys.exit(seen == wanted or bool(about))
PYTHON
"$FOLDER/venv/bin/python" "$FOLDER/try.py" "$FOLDER"
