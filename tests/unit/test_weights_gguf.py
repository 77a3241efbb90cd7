"""No key, tensor or part of a GGUF model is ignored silently; its tokenizer gives llama.cpp's tokens."""

from __future__ import annotations

import math
import os
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from floodplain.core.errors import UserError
from floodplain.model.hf_tokenizer import HfTokenizer
from floodplain.model.network.config import RopeConfig
from floodplain.model.network.fields import Fields
from floodplain.model.network.hf_rope import yarn_attention
from floodplain.model.weights.gguf_file import GgufFile
from floodplain.model.weights.gguf_header import MAX_HEADER_BYTES, read_header
from floodplain.model.weights.gguf_tokenizer import BYTE_LEVEL, read_gguf_tokenizer
from floodplain.model.weights.open_model import packaged_smollm2
from tests.support.gguf_files import gguf_keys, gguf_tensors, write_gguf_file
from tests.support.llama_texts import keys_of, read_data
from tests.unit.test_weights import DUMMY, dummy_weights, logits_of, refusal, write_gguf

TENSORS = gguf_tensors(DUMMY.config, dummy_weights())
KEYS = gguf_keys(DUMMY.config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.type", "adapter"),
        ("general.quantization_version", 1),
        ("llama.attention.head_count", 6),
        ("llama.attention.key_length", 15),
        ("llama.attention.value_length", 32),
        ("llama.attention.sliding_window", 100),
        ("llama.attention.scale", 0.5),
        ("llama.attention.causal", False),
        ("llama.expert_count", 8),
        ("llama.logit_scale", 0.25),
        ("llama.rope.dimension_count", 8),
        ("llama.rope.scaling.type", "longrope"),
        ("llama.rope.scaling.factor", -2.0),
        ("llama.rope.scaling.attn_factor", 1.5),
        ("llama.vocab_size", 100),
        ("llama.block_count", 1.5),
        ("llama.some_new_key", 1),
        ("split.chunks", 2),
        ("tokenizer.ggml.model", "t5"),
        ("tokenizer.ggml.some_new_key", "x"),
    ],
)
def test_a_key_that_is_not_computed_is_named(tmp_path: Path, key: str, value: object) -> None:
    assert key in refusal(write_gguf_file(tmp_path / "m.gguf", {**KEYS, key: value}, TENSORS))


def test_every_key_and_every_tensor_is_read(tmp_path: Path) -> None:
    usual = GgufFile(write_gguf_file(tmp_path / "m.gguf", KEYS, TENSORS), "m")
    logits = logits_of(usual)
    for key, value in KEYS.items():
        assert isinstance(value, int | float)
        path = write_gguf_file(tmp_path / "k.gguf", {**KEYS, key: value * 4}, TENSORS)
        try:
            source = GgufFile(path, "m")
        except UserError as error:
            assert key in str(error)
            continue
        assert source.config != usual.config, key
        assert source.config.shape.max_position != 2048 or not torch.equal(logits_of(source), logits), key
    for name, tensor in TENSORS.items():
        path = write_gguf_file(tmp_path / "t.gguf", KEYS, {**TENSORS, name: (tensor.flip(0) * 1.5 + 0.1)})
        assert not torch.allclose(logits_of(GgufFile(path, "m")), logits, rtol=0, atol=1e-4), name


def test_what_a_tokenizer_would_leave_out_is_named(tmp_path: Path) -> None:
    for keys in (
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "viking"},
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.remove_extra_whitespaces": True},
    ):
        assert list(keys)[1] in refusal(write_gguf_file(tmp_path / "m.gguf", {**KEYS, **keys}, TENSORS))


def test_keys_that_change_nothing_are_passed_over(tmp_path: Path) -> None:
    harmless = {
        "general.name": "tiny",
        "general.sampling.temp": 0.5,
        "llama.vocab_size": 288,
        "llama.rope.dimension_count": 16,
        "llama.expert_count": 0,
        "llama.logit_scale": 1.0,
        "quantize.imatrix.file": "x",
        "tokenizer.chat_template": "x",
    }
    path = write_gguf_file(tmp_path / "m.gguf", {**KEYS, **harmless}, TENSORS)
    assert torch.equal(logits_of(GgufFile(path, "m")), logits_of(DUMMY))


YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}


@pytest.mark.parametrize(
    ("keys", "rope", "context"),
    [
        ({"llama.rope.scale_linear": 4.0}, RopeConfig(1e4, "linear", 4.0), 8192),
        ({"llama.rope.scaling.factor": 4.0}, RopeConfig(1e4, "linear", 4.0), 8192),
        ({"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 2.0}, RopeConfig(1e4, "linear", 4.0), 8192),
        ({"llama.rope.scaling.factor": 0.0}, RopeConfig(1e4), 2048),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, RopeConfig(1e4), 2048),
        (
            {**YARN, "llama.rope.scaling.original_context_length": 1024},
            RopeConfig(1e4, "yarn", 4.0, original_max_position=1024, attention_factor=yarn_attention(4.0)),
            4096,
        ),
    ],
)
def test_rope_is_scaled_as_llama_cpp_does(
    tmp_path: Path, keys: dict[str, object], rope: RopeConfig, context: int
) -> None:
    config = GgufFile(write_gguf_file(tmp_path / "m.gguf", {**KEYS, **keys}, TENSORS), "m").config
    assert (config.rope, config.shape.max_position) == (rope, context)


@pytest.mark.parametrize(
    "name",
    ["blk.0.attn_q_norm.weight", "blk.1.attn_q.bias", "blk.2.attn_q.weight", "output.bias", "rope_factors_long.weight"],
)
def test_a_tensor_that_is_not_computed_is_named(tmp_path: Path, name: str) -> None:
    assert name in refusal(write_gguf_file(tmp_path / "m.gguf", KEYS, {**TENSORS, name: torch.ones(64)}))


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    """Its header could be read, and the scales of its blocks would be wrong numbers."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "it is big-endian: convert it" in refusal(tmp_path / "m.gguf")


def test_integers_are_no_weights(tmp_path: Path) -> None:
    name = "blk.0.attn_q.weight"
    changed = {**TENSORS, name: TENSORS[name].to(torch.int8)}
    assert f"{name!r} has the data type I8" in refusal(write_gguf_file(tmp_path / "m.gguf", KEYS, changed))


def write_parts(folder: Path, count: int = 3, **changes: object) -> Path:
    """tiny-llama in ``count`` files; ``changes`` are keys of the second, with ``__`` for a dot."""
    names = list(TENSORS)
    paths = [folder / f"m-{number + 1:05}-of-{count:05}.gguf" for number in range(count)]
    for number, path in enumerate(paths):
        split = {"split.no": number, "split.count": count, "split.tensors.count": len(names)}
        more = {key.replace("__", "."): value for key, value in changes.items()} if number == 1 else {}
        part = {name: TENSORS[name] for name in names[number::count]}
        write_gguf_file(path, {**(KEYS if number == 0 else {}), **split, **more}, part)
    return paths[0]


def test_all_parts_of_a_split_model_are_loaded(tmp_path: Path) -> None:
    source = GgufFile(write_parts(tmp_path), "m")
    assert not source.config.shape.tied_embeddings
    assert torch.equal(logits_of(source), logits_of(DUMMY))


def test_the_error_of_a_split_model_names_the_missing_or_wrong_part(tmp_path: Path) -> None:
    first = write_parts(tmp_path)
    second, third = (tmp_path / f"m-{number:05}-of-00003.gguf" for number in (2, 3))
    assert "part 2 of 3; name m-00001-of-00003.gguf" in refusal(second)
    whole = third.read_bytes()
    third.unlink()
    assert "m-00003-of-00003.gguf is missing" in refusal(first)
    third.write_bytes(second.read_bytes())
    assert "in m-00002-of-00003.gguf, too" in refusal(first)
    third.write_bytes(whole)
    alone = first.rename(tmp_path / "alone.gguf")
    assert "its name must end in -00001-of-00003.gguf" in refusal(alone)
    assert "split.count=4" in refusal(write_parts(tmp_path, split__count=4))
    assert "split.no=2" in refusal(write_parts(tmp_path, split__no=2))
    assert "llama.block_count=9" in refusal(write_parts(tmp_path, llama__block_count=9))
    plain = write_gguf(tmp_path / "x-00001-of-00002.gguf", skip="output.weight")
    assert "split.count is 1" in refusal(plain)
    assert "this is part 3 of 1" in refusal(write_gguf(tmp_path / "m.gguf", split__no=2))
    short = {**KEYS, "split.no": 0, "split.count": 1, "split.tensors.count": 99}
    assert "split.tensors.count is 99" in refusal(write_gguf_file(tmp_path / "m.gguf", short, TENSORS))


# -- headers are read as the gguf package reads them -------------------------------------------------------------------


def write(path: Path, name: str) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    for number, add in enumerate(
        (writer.add_uint8, writer.add_int8, writer.add_uint16, writer.add_int16, writer.add_uint64, writer.add_int64)
    ):
        add(f"some.whole.{number}", 100 + number)
    writer.add_float64("some.number", 0.1)
    writer.add_array("some.flags", [True, False])
    writer.add_array("some.numbers", [0.1, -2.5])
    writer.add_custom_alignment(64)
    writer.add_tensor("odd", np.arange(3, dtype=np.float16))
    writer.add_tensor("next", np.ones((2, 3), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_headers_are_read_as_by_the_packages_own_reader(tmp_path: Path) -> None:
    for path in (packaged_smollm2(), write(tmp_path / "m.gguf", "any")):
        (keys, tensors), own = read_header(path, 0), gguf.GGUFReader(path)
        assert keys == {k: field.contents() for k, field in own.fields.items() if not k.startswith("GGUF.")}
        assert [(name, list(one.shape), one.kind, one.begin, math.prod(one.row_shape)) for name, one in tensors] == [
            (one.name, one.shape.tolist()[::-1], one.tensor_type.name, one.data_offset, one.n_bytes)
            for one in own.tensors
        ]


def test_text_that_is_not_utf8_is_refused_where_it_is_read(tmp_path: Path) -> None:
    for key, is_read in (("general.author", False), ("general.architecture", True)):
        path = write_gguf(tmp_path / "m.gguf", general__author="Jose")
        data = path.read_bytes()
        begin = data.index(b"Jose" if not is_read else b"llama", data.index(key.encode()))
        path.write_bytes(data[:begin] + b"\xe9" + data[begin + 1 :])
        if is_read:
            assert "general.architecture=b'" in refusal(path)
        else:
            assert logits_of(GgufFile(path, "m")).equal(logits_of(GgufFile(write_gguf(path), "m")))


def test_a_header_is_bounded(tmp_path: Path) -> None:
    path, num_bytes = tmp_path / "m.gguf", MAX_HEADER_BYTES
    begin = b"GGUF" + struct.pack("<IQQQ14sIQ", 3, 0, 1, 14, b"general.author", 8, num_bytes)
    path.write_bytes(begin)
    os.truncate(path, len(begin) + num_bytes)  # sparse
    assert f"its header has more than {num_bytes} bytes" in refusal(path)


def test_a_file_that_is_cut_after_it_was_opened_is_one_line(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    model = GgufFile(path, "m")
    os.truncate(path, path.stat().st_size - 5000)
    with pytest.raises(UserError, match=r"m\.gguf: "):
        logits_of(model)


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "before")
    before = read_header(path, 1)
    assert read_header(path, 1) is before
    write(path, "after")
    assert read_header(path, 2)[0]["general.name"] == "after"


@pytest.mark.parametrize(
    ("version", "keys", "reason"),
    [
        (4, b"", "its version is 4, and 2 and 3 are supported"),
        (3, struct.pack("<Q1sIB", 1, b"a", 0, 7) * 2, "its key 'a' occurs twice"),
        (3, struct.pack("<Q17sII", 17, b"general.alignment", 4, 24), "general.alignment is not a power of two"),
    ],
)
def test_a_header_that_the_package_refuses_is_refused(tmp_path: Path, version: int, keys: bytes, reason: str) -> None:
    path = tmp_path / "m.gguf"
    num_keys = 2 if "twice" in reason else min(1, len(keys))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, num_keys) + keys)
    assert reason in refusal(path)


# -- tokenizers of GGUF files ------------------------------------------------------------------------------------------


NAMES = ("llama", *BYTE_LEVEL)


@lru_cache(maxsize=1)
def data() -> dict[str, Any]:
    return read_data()


def tokenizer(name: str, **changes: object) -> HfTokenizer:
    """The tokenizer of a name, with ``tokenizer.ggml.KEY`` changed, or left out where the value is None."""
    keys = {**keys_of(name, data()), **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    fields = Fields({key: value for key, value in keys.items() if value is not None}, "m.gguf")
    return HfTokenizer(*read_gguf_tokenizer(fields))


def test_every_name_gives_texts_the_tokens_of_llama_cpp() -> None:
    rows = {defaults: name for name, defaults in BYTE_LEVEL.items()}  # names with equal defaults are tried once
    for name in ("llama", *rows.values()):
        ours = tokenizer(name)
        assert [ours.encode(text) for text in data()["texts"]] == data()["ids"][name], name
    assert all(data()["ids"][name] == data()["ids"][rows[defaults]] for name, defaults in BYTE_LEVEL.items())


def test_the_texts_distinguish_all_defaults() -> None:
    """Otherwise a wrong line of the table would pass."""
    assert len({str(ids) for ids in data()["ids"].values()}) == len(set(BYTE_LEVEL.values())) + 1
    assert set(data()["ids"]) == set(NAMES)


@pytest.mark.parametrize("name", ["llama", "smollm", "gpt-4o"])
def test_decoded_tokens_are_the_text(name: str) -> None:
    ours = tokenizer(name)
    for text in data()["texts"]:
        shown = text.replace("\u2581", " ") if name == "llama" else text  # SentencePiece does not distinguish these
        decoded = ours.decode(ours.encode(text, add_special_tokens=False))
        assert decoded == shown or (name == "llama" and "<" in text), text  # a space is added after special tokens


@pytest.mark.parametrize(
    ("name", "changes", "begins", "ends"),
    [
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("qwen2", {}, False, False),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, True, True),
        ("qwen2", {"bos_token_id": None}, False, False),
        ("llama", {}, True, False),
        ("llama", {"add_bos_token": False, "add_eos_token": True}, False, True),
        ("llama", {"bos_token_id": None, "eos_token_id": None, "add_eos_token": True}, True, True),
    ],
)
def test_keys_decide_what_goes_around_a_text(name: str, changes: dict[str, Any], begins: bool, ends: bool) -> None:
    ours = tokenizer(name, **changes)
    inner = ours.encode("ab", add_special_tokens=False)
    keys = keys_of(name, data())
    first = [keys["tokenizer.ggml.bos_token_id"]] if begins else []
    last = [keys["tokenizer.ggml.eos_token_id"]] if ends else []
    assert ours.encode("ab") == [*first, *inner, *last]


def test_the_key_can_turn_off_the_added_space() -> None:
    plain, usual = tokenizer("llama", add_space_prefix=False), tokenizer("llama")
    assert plain.encode(" river") == usual.encode("river") != plain.encode("river")
    assert plain.decode(plain.encode(" river")[1:]) == " river"


def test_special_tokens_of_phi_3_drop_the_space_behind_them() -> None:
    keys = {**keys_of("llama", data()), "general.name": "Phi-3 mini"}
    phi = HfTokenizer(*read_gguf_tokenizer(Fields(keys, "m.gguf")))
    assert phi.encode("<|im_start|> \n a<s> b") == tokenizer("llama").encode("<|im_start|>a<s> b")


def test_answers_end_where_llama_cpp_ends_them() -> None:
    """Ends are set by keys and by texts of tokens."""
    ids = [str(token) for token in keys_of("qwen2", data())["tokenizer.ggml.tokens"]]  # type: ignore[attr-defined]
    by_text = {ids.index("<|end_of_text|>"), ids.index("<|im_end|>")}
    assert tokenizer("qwen2", eos_token_id=3, eot_token_id=5, fim_pad_token_id=7).eos_token_ids == {3, 5, 7} | by_text
    types = [1] * len(ids)
    assert tokenizer("qwen2", token_type=types).special_token_ids == by_text  # they are control tokens


def test_a_key_that_names_no_token_counts_as_absent(caplog: pytest.LogCaptureFixture) -> None:
    ours = tokenizer("llama", padding_token_id=2**32 - 1, eos_token_id=10_000, eot_token_id=10_000)
    assert (ours.eos_token_ids, ours.encode("a")) == (tokenizer("llama").eos_token_ids, tokenizer("llama").encode("a"))
    assert [record.args[1] for record in caplog.records] == [  # type: ignore[index]
        f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "padding", "eot")
    ]


def test_chat_templates_have_tokens_that_are_not_special() -> None:
    template = "{{ bos_token }}|{{ eos_token }}"
    keys = {**keys_of("qwen2", data()), "tokenizer.ggml.eos_token_id": 3, "tokenizer.chat_template": template}
    ours = HfTokenizer(*read_gguf_tokenizer(Fields(keys, "m.gguf")))
    assert ours.render_chat([{"role": "user", "content": "a"}]) == "<|begin_of_text|>|$"
    assert ours.encode("a$b") == tokenizer("qwen2").encode("a$b")


def test_tools_take_the_template_for_tools() -> None:
    templates = {"": "plain", ".tool_use": "{{ tools | length }} tools", "s": ["tool_use"]}
    keys = {**keys_of("qwen2", data()), **{f"tokenizer.chat_template{name}": text for name, text in templates.items()}}
    ours, chat = HfTokenizer(*read_gguf_tokenizer(Fields(keys, "m.gguf"))), [{"role": "user", "content": "a"}]
    assert (ours.render_chat(chat), ours.render_chat(chat, [{"type": "function"}])) == ("plain", "1 tools")


@pytest.mark.parametrize("template", [5, True, ["a"], {"default": 5}])
def test_a_chat_template_that_is_no_text_is_refused(template: object) -> None:
    keys = {**keys_of("qwen2", data()), "tokenizer.chat_template": template}
    with pytest.raises(ValueError, match="the chat template must be a text"):
        read_gguf_tokenizer(Fields(keys, "m.gguf"))


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("qwen2", {"pre": "qwen3"}, "pre='qwen3' is not supported, only 'default' or"),
        ("qwen2", {"model": "t5"}, "model='t5' is not supported"),
        ("qwen2", {"merges": ["! !", "!! \u00ff\u00ff"]}, "merges has '!! \u00ff\u00ff', of which a part is no token"),
        ("qwen2", {"merges": None}, "'tokenizer.ggml.merges' is missing"),
        ("qwen2", {"tokens": ["a", "b", "a"], "token_type": None}, "tokens has 'a' more than once"),
        ("qwen2", {"bos_token_id": -1}, "bos_token_id=-1 must be a whole number from 0 on"),
        ("llama3", {"bos_token_id": 10_000}, "bos_token_id is missing: every text needs that token"),
        ("llama3", {"bos_token_id": None}, "bos_token_id is missing: every text needs that token"),
        ("qwen2", {"token_type": [1]}, "token_type=[1] must be a list of numbers, one for each"),
        ("llama", {"tokens": ["a", "b"], "scores": None, "token_type": None}, "must have all bytes, <0x00> to <0xFF>"),
        ("llama", {"scores": None}, "scores has the same number for"),
    ],
)
def test_what_cannot_be_done_as_llama_cpp_does_is_named(name: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as error:
        tokenizer(name, **changes)
    assert named in str(error.value) and "\n" not in str(error.value)


def test_a_token_that_is_stored_twice_is_found_in_linear_time() -> None:
    class Counted(str):
        num_compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.num_compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    tokens = [Counted(f"t{number}") for number in range(1000)]
    with pytest.raises(UserError, match="tokens has 't999' more than once"):
        tokenizer("qwen2", tokens=[*tokens, Counted("t999")], token_type=None)
    assert Counted.num_compared < 10 * len(tokens)


def test_a_merge_that_is_stored_twice_counts_once() -> None:
    merges = ["a b", "b c", "ab c", "a b"]
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "bc", "abc"]
    ours = tokenizer("qwen2", merges=merges, tokens=letters, token_type=None, bos_token_id=None, eos_token_id=None)
    assert [ours.decode([token]) for token in ours.encode("abc")] == ["abc"]
