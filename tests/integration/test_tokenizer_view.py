"""Tokenizer settings of a folder are read as AutoTokenizer reads them; code that they name is never run."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import gguf
import pytest
import transformers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from floodplain.core.errors import UserError
from floodplain.model.fast_tokenizer import read_plain
from floodplain.model.hf_tokenizer import HfTokenizer
from floodplain.model.tokenizer_view import view_of_folder

TEXTS = ["the river", " floods  the plain", "<s>r\u00eaverie</s> 1234", "", "\n\u6cb3<|turn|> x"]
CORPUS = ["the river floods the plain", "r\u00eaverie 1234 \u6cb3\u5ddd"] * 3
SPECIAL = ["<unk>", "<s>", "</s>", "<|turn|>"]
TEMPLATE = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"


def byte_level(post: bool = False) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    if post:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def metaspace() -> Backend:
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=340, special_tokens=[*SPECIAL, *letters]))
    content = json.loads(backend.to_str())
    content["added_tokens"] = content["added_tokens"][: len(SPECIAL)]
    content["post_processor"] = json.loads(
        processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)]).__getstate__()
    )
    return Backend.from_str(json.dumps(content))


def write(folder: Path, architecture: str, tokenizer_class: str | None, backend: Backend, **settings: Any) -> None:
    types = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "OPTForCausalLM": "opt"}
    types["Qwen3ForCausalLM"] = "qwen3"
    config = {"architectures": [architecture], "model_type": types.get(architecture, "mistral")}
    (folder / "config.json").write_text(json.dumps({**config, "transformers_version": "4.40.0"}))
    named = {} if tokenizer_class is None else {"tokenizer_class": tokenizer_class}
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<|turn|>"]}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**tokens, "chat_template": TEMPLATE, "model_max_length": 10**30, **named, **settings})
    )
    backend.save(str(folder / "tokenizer.json"))


def split(folder: Path) -> None:
    """Rewrite a byte-level tokenizer in its older form: a vocabulary and its merges."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    pairs = (merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"])
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs, ""]))


def opt(folder: Path) -> None:
    more = {"add_bos_token": True, "add_prefix_space": False, "errors": "replace"}
    write(folder, "OPTForCausalLM", "GPT2Tokenizer", byte_level(), **more)
    split(folder)
    (folder / "special_tokens_map.json").write_text('{"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>"}')


def qwen2() -> Backend:
    backend, words = byte_level(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated")
    backend.normalizer, backend.pre_tokenizer = normalizers.NFC(), pre_tokenizers.Sequence([split, words])
    return backend


def digits() -> Backend:
    backend = qwen2()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), backend.pre_tokenizer])
    return backend


QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = {"bos_token": None, "pad_token": "<unk>", "unk_token": None}
FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
ADDED = {"added_tokens_decoder": {str(number): {"content": text, **FLAGS} for number, text in enumerate(SPECIAL)}}
TEMPLATES = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}]


def template_in_a_file(folder: Path) -> None:
    written(LLAMA, FAST, with_bos)(folder)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")


def padded(folder: Path, pad_token: str) -> None:
    backend = byte_level()
    backend.enable_padding(length=20, pad_token=pad_token)
    backend.enable_truncation(2)
    write(folder, LLAMA, FAST, backend)


def special_map(folder: Path) -> None:
    written(LLAMA, FAST)(folder)
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|turn|>"}')


def with_bos() -> Backend:
    return byte_level(post=True)


def written(
    architecture: str, tokenizer_class: str | None, make: Callable[[], Backend] = byte_level, **settings: Any
) -> Callable[[Path], None]:
    return lambda folder: write(folder, architecture, tokenizer_class, make(), **settings)


LLAMA, QWEN2_MODEL, QWEN3, OPT = (f"{name}ForCausalLM" for name in ("Llama", "Qwen2", "Qwen3", "OPT"))
FAST = "PreTrainedTokenizerFast"
FAMILIES: dict[str, Callable[[Path], None]] = {
    "llama 2": written(LLAMA, "LlamaTokenizer", metaspace, legacy=False),
    "llama 2, legacy, no bos": written(LLAMA, "LlamaTokenizerFast", metaspace, legacy=True, add_bos_token=False),
    "llama 2, no prefix space": written(LLAMA, "LlamaTokenizer", metaspace, add_prefix_space=False),
    "llama 3": written(LLAMA, FAST, with_bos),
    "llama, other kind": written(LLAMA, "LlamaTokenizer", with_bos),
    "mistral": written("MistralForCausalLM", "LlamaTokenizer", metaspace),
    "smollm2": written(LLAMA, "GPT2Tokenizer", unk_token="<unk>"),
    "no class": written(LLAMA, None, with_bos),
    "qwen2": written(QWEN2_MODEL, "Qwen2Tokenizer", bos_token=None, pad_token="<unk>"),
    "qwen3": written(QWEN3, "Qwen2Tokenizer"),
    "opt": opt,
    "opt, one file": written(OPT, "GPT2Tokenizer", unk_token="<unk>"),
    "qwen2, own parts": written(QWEN2_MODEL, FAST, qwen2, **QWEN2),
    "qwen3, own parts": written(QWEN3, "Qwen2TokenizerFast", qwen2, **QWEN2),
    "qwen2, prefix space": written(QWEN2_MODEL, "Qwen2Tokenizer", qwen2, add_prefix_space=True, **QWEN2),
    "qwen2, other digits": written(QWEN2_MODEL, "Qwen2Tokenizer", digits, **QWEN2),
    "llama 3, templates": written(LLAMA, FAST, chat_template=TEMPLATES, **ADDED),
    "llama 3, template in a file": template_in_a_file,
    "llama 3, more tokens": written(LLAMA, FAST, pad_token="<pad>", **ADDED),
    "llama 3, a word as a token": written(LLAMA, FAST, pad_token="the"),
    "llama 3, split special tokens": written(LLAMA, FAST, with_bos, split_special_tokens=True),
    "llama 3, padded": lambda folder: padded(folder, "</s>"),
    "llama 3, padded with a new token": lambda folder: padded(folder, "[PAD]"),
    "llama 3, a special map": special_map,
}
PLAIN = frozenset({
    "llama 3", "llama, other kind", "mistral", "smollm2", "no class", "opt, one file", "qwen2, own parts",
    "qwen3, own parts", "llama 3, templates", "llama 3, template in a file", "llama 3, split special tokens",
    "llama 3, padded",
})  # fmt: skip
"""Folders that are read without transformers."""


CHAT = [{"role": "user", "content": "the plain"}]


def everything(tokenizer: HfTokenizer) -> list[Any]:
    tokens = [tokenizer.encode(text, add_special_tokens=special) for text in TEXTS for special in (True, False)]
    texts = [tokenizer.decode(ids, skip_special_tokens=skips) for ids in tokens for skips in (True, False)]
    ends, special = list(tokenizer.eos_token_ids), sorted(tokenizer.special_tokens.items())
    names = dict(tokenizer._tokenizer.names)
    return [tokens, texts, tokenizer.render_chat(CHAT), tokenizer.vocab_size, ends, special, names]


def everything_by_transformers(folder: Path) -> list[Any]:
    own = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    tokens = [own.encode(text, add_special_tokens=special) for text in TEXTS for special in (True, False)]
    texts = [own.decode(ids, skip_special_tokens=skips) for ids in tokens for skips in (True, False)]
    special = sorted((token.content, number) for number, token in own.added_tokens_decoder.items() if token.special)
    chat = own.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    return [tokens, texts, chat, len(own), [own.eos_token_id], special, own.special_tokens_map]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_view_gives_the_tokens_of_the_folder(tmp_path: Path, family: str) -> None:
    FAMILIES[family](tmp_path)
    assert everything(HfTokenizer.from_folder(tmp_path)) == everything_by_transformers(tmp_path)
    with view_of_folder(tmp_path) as view:
        assert (read_plain(view) is not None) == (family in PLAIN)


def test_families_differ_where_settings_do(tmp_path: Path) -> None:
    """Negative control: a view that lost these settings would give other tokens."""
    seen = set()
    for family in ("llama 2", "llama 2, no prefix space", "smollm2", "llama 3", "opt"):
        folder = tmp_path / family
        folder.mkdir()
        FAMILIES[family](folder)
        seen.add(str(everything(HfTokenizer.from_folder(folder))))
    assert len(seen) == 5


EVIL = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nclass Evil: pass\n"
MAP = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil"}


def plant_code(folder: Path, file: str, **more: Any) -> None:
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, "auto_map": MAP, **more}))
    (folder / "evil.py").write_text(EVIL)


def test_code_beside_a_tokenizer_is_not_run_and_logged_as_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FAMILIES["llama 3"](tmp_path)
    before = everything(HfTokenizer.from_folder(tmp_path))
    plant_code(tmp_path, "tokenizer_config.json", gguf_file="m.gguf", tokenizer_file="/etc/passwd", init_inputs=[1])
    plant_code(tmp_path, "config.json")
    with caplog.at_level(logging.WARNING):
        assert everything(HfTokenizer.from_folder(tmp_path)) == before
    assert "auto_map is ignored" in caplog.text
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("name", ["Evil", "AutoTokenizer", "Trainer", "evil.Evil", "", 5, ["LlamaTokenizer"]])
def test_a_class_that_is_not_listed_is_refused_by_name(tmp_path: Path, file: str, name: object) -> None:
    FAMILIES["llama 3"](tmp_path)
    plant_code(tmp_path, file, tokenizer_class=name)
    with pytest.raises(UserError, match=f"{file}: tokenizer_class=.* is not supported, only"):
        HfTokenizer.from_folder(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_gguf_file_is_read_without_its_neighbours(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_block_count, 1), (writer.add_context_length, 8), (writer.add_embedding_length, 8),
        (writer.add_feed_forward_length, 8), (writer.add_head_count, 1), (writer.add_layer_norm_rms_eps, 1e-5),
    ):  # fmt: skip
        add(value)
    backend = byte_level()
    model = json.loads(backend.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(model["vocab"]) - len(SPECIAL)))
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    alone = HfTokenizer.from_gguf(path).encode(TEXTS[0])
    plant_code(tmp_path, "tokenizer_config.json", tokenizer_class="Evil", chat_template="stranger")
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "chat_template.jinja").write_text("stranger")
    beside = HfTokenizer.from_gguf(path)
    assert beside.encode(TEXTS[0]) == alone == backend.encode(TEXTS[0]).ids
    assert not beside.has_chat_template
    assert not (tmp_path / "ran").exists()


def test_a_view_holds_data_alone_and_is_gone_afterwards(tmp_path: Path) -> None:
    FAMILIES["opt"](tmp_path)
    plant_code(tmp_path, "tokenizer_config.json")
    (tmp_path / "tokenizer.model").mkdir()
    os.mkfifo(tmp_path / "chat_template.jinja")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tools.jinja").write_text(TEMPLATE)
    with view_of_folder(tmp_path) as view:
        found = {str(path.relative_to(view)) for path in view.rglob("*") if path.is_file()}
        assert found == {
            "additional_chat_templates/tools.jinja", "config.json", "merges.txt", "special_tokens_map.json",
            "tokenizer_config.json", "vocab.json",
        }  # fmt: skip
        assert "auto_map" not in (view / "tokenizer_config.json").read_text()
    assert not view.exists()


def test_without_room_for_a_temporary_folder_the_error_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAMILIES["opt"](tmp_path)

    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", refuse)
        with pytest.raises(UserError, match=r"no temporary folder can be made \(No space left .* set TMPDIR"):
            HfTokenizer.from_folder(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nothing"))
    with pytest.raises(UserError, match=r"no temporary folder can be made .* set TMPDIR"):
        HfTokenizer.from_folder(tmp_path)
