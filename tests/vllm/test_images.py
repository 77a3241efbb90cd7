"""Prompts with images: tokens are those of stock vLLM, wherever in a prompt a request is preempted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from vllm import LLM

from floodplain.core.plan import Transfer, TransferKind
from floodplain.core.tiers import Location
from floodplain.memory.swap_space import SwapSpace
from tests.vllm.engines import BLOCK_TOKENS, Load, controller_of, drive, scheduler_of, worker_of
from tests.vllm.storm import StormPolicy

SIDE = 128
"""Pixels of an image's side. An image is 64 tokens, two whole blocks, and is split by most chunks of a prompt."""
NUM_WORDS = 2_000
PLACE = "<image>"


def write_model(folder: Path) -> None:
    """Write a model like SmolVLM (Idefics3) with random weights, and a processor for it whose words are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        PreTrainedTokenizerFast,
    )

    marks = [PLACE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    names = ["<unk>", "<s>", "</s>", *marks]
    words = {name: number for number, name in enumerate(names + [str(i) for i in range(len(names), NUM_WORDS)])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    text = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=marks, **ends)
    size = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    Idefics3Processor(images, text, image_seq_len=(SIDE // 16) ** 2).save_pretrained(folder)
    sees = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    writes = {
        "model_type": "llama", "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": NUM_WORDS,
        "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    vision = sees | {"image_size": SIDE, "patch_size": 16, "initializer_range": 0.2}
    config = Idefics3Config(
        vision_config=vision, text_config=writes | {"initializer_range": 0.2}, image_token_id=words[PLACE],
        scale_factor=1, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)


@dataclass(frozen=True)
class ImageLoad(Load):
    """Each prompt has an image, and every third has two; the image's number is ``pictures[index]``."""

    pictures: tuple[int, ...] = ()

    def send(self, llm: LLM, indices: Sequence[int] | None = None) -> None:
        for index in range(len(self)) if indices is None else indices:
            images = [draw(self.pictures[index] + number) for number in range(1 + (index % 3 == 0))]
            prompt = {"prompt_token_ids": list(self.prompts[index]), "multi_modal_data": {"image": images}}
            llm.llm_engine.add_request(str(index), prompt, self.params(index))


def draw(seed: int) -> Image.Image:
    """An image of large random squares."""
    pixels = np.random.default_rng(seed).integers(0, 255, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.NEAREST)


def make_load(num_requests: int) -> ImageLoad:
    """Pairs of requests have the same text, and different images in it."""
    prompts, rng = [], Random(11)
    for index in range(num_requests):
        if index % 6 < 3:
            texts = [[rng.randrange(10, NUM_WORDS) for _ in range(rng.randrange(20, 70))] for _ in range(3)]
            first, second, third = texts
            prompts.append((*first, 3, *second, *((3, *third) if index % 3 == 0 else third)))
        else:
            prompts.append(prompts[index - 3])
    lengths = tuple(rng.randrange(20, 80) for _ in range(num_requests))
    return ImageLoad(tuple(prompts), lengths, tuple(100 * index for index in range(num_requests)))


LOAD = make_load(12)
FLAGS = {
    "skip_tokenizer_init": False, "enable_prefix_caching": True, "num_gpu_blocks_override": 36,
    "limit_mm_per_prompt": {"image": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path, load: ImageLoad) -> dict[int, list[int]]:
    from tests.vllm.engines import close, finished_tokens, make_stock

    llm = make_stock(folder, limit_mm_per_prompt={"image": 2})
    tokens: list[dict[int, list[int]]] = []
    for one in (load, replace(load, pictures=tuple(number + 7 for number in load.pictures))):
        tokens.append({})
        one.send(llm)
        while llm.llm_engine.has_unfinished_requests():
            tokens[-1] |= finished_tokens(llm)
    close(llm)
    assert all(tokens[0][index] != tokens[1][index] for index in tokens[0]), "tokens depend on the images"
    return tokens[0]


def test_prompts_with_images_survive_a_storm(llm: LLM, load: Load, expected: dict[int, list[int]]) -> None:
    policy = scheduler_of(llm).policy_object = StormPolicy(seed=1, chance=0.1)
    run = drive(llm, load)
    assert run.tokens == expected
    assert policy.num_sent_away > 30 and run.resumed.count(1) > 10


def test_images_are_split_by_chunks_of_prompts(llm: LLM, load: Load, expected: dict[int, list[int]]) -> None:
    """Requests are preempted, and come back from swap space, between two parts of an image."""
    scheduler = scheduler_of(llm)
    scheduler.policy_object = StormPolicy(seed=2, chance=0.3, recompute=0.0)
    within = 0

    def note(step: int) -> None:
        nonlocal within
        for request in scheduler.waiting:
            kept = scheduler._controller.roster[request.request_id].num_kept_tokens
            places = [feature.mm_position for feature in request.mm_features]
            within += any(place.offset < kept < place.offset + place.length for place in places)

    assert drive(llm, load, each_step=note).tokens == expected
    assert within > 10


def test_the_storm_notices_a_block_of_another_image(
    llm: LLM, load: Load, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: of what is swapped in, each block within an image is replaced by the one before, digest too."""
    scheduler_of(llm).policy_object = StormPolicy(seed=1, chance=0.1, recompute=0.0)
    slots, start, last = worker_of(llm).slots, SwapSpace.start, list[Any]()

    def start_wrong(space: SwapSpace, transfer: Transfer) -> None:
        if transfer.kind is TransferKind.SWAP_IN:
            for location in locate_images(llm, transfer):
                words, digest = slots.words[location.slot].clone(), slots.digests[location.slot]
                if last:
                    slots.words[location.slot], slots.digests[location.slot] = last
                last[:] = words, digest
        start(space, transfer)

    monkeypatch.setattr(SwapSpace, "start", start_wrong)
    tokens = drive(llm, load).tokens
    assert sum(tokens[index] != expected[index] for index in expected) > len(load) // 2


def locate_images(llm: LLM, transfer: Transfer) -> list[Location]:
    """Where a copy has blocks all of whose tokens are an image's."""
    assert transfer.seq_id is not None
    request = controller_of(llm).roster.by_id[transfer.seq_id].request
    [table] = scheduler_of(llm).finder.tables(request.request_id)
    first_tokens = {block.block_id: place * BLOCK_TOKENS for place, block in enumerate(table)}
    spans = [(one.mm_position.offset, one.mm_position.offset + one.mm_position.length) for one in request.mm_features]
    pairs = zip(transfer.blocks, transfer.locations, strict=True)
    return [
        location
        for block, location in pairs
        if any(begin <= first_tokens[block] <= end - BLOCK_TOKENS for begin, end in spans)
    ]
