"""A tiny model with random weights in a folder, and a server over it in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)


def make_model(folder: Path) -> None:
    """Write a Llama of 2 layers, with a byte-level tokenizer and a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=2048, eos_token_id=256, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (URL, name of the model) of a server, which ends with the context."""
    floodplain = str(Path(sys.executable).with_name("floodplain"))
    command = [floodplain, "serve", str(folder), "--port", "0", "--format", "json", "--quiet"]
    command += ["--kv-memory", "16MiB", "--dtype", "float32"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            facts = json.loads(process.stdout.readline())
            yield facts["url"], facts["model"]
        finally:
            process.terminate()
            process.wait(60)
