"""Compares token ids with llama.cpp's, for every kind of ``.gguf`` tokenizer that is served.

``--write`` makes the data of ``tests/support/llama_texts.py``: merges from our own docs, and llama.cpp's ids.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from floodplain.model.hf_tokenizer import HfTokenizer
from floodplain.model.weights.gguf_tokenizer import BYTE_LEVEL
from tests.support.llama_texts import CORPUS_LINES, DATA, keys_of, read_data, texts, write_model

ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
NAMES = ("llama", *BYTE_LEVEL)
NUM_COMMITTED, NUM_TRIED = 200, 2000


def ids_by_llama_cpp(python: Path, model: Path, of: list[str]) -> list[list[int]]:
    """Return llama.cpp's ids of the texts with a model's tokenizer."""
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("llama_cpp_ids.py")), str(model)],
        input=json.dumps(of), capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    return list(json.loads(done.stdout))


def compare(python: Path = PYTHON) -> dict[str, Any]:
    """Tokenize ``NUM_TRIED`` texts a name, here and by llama.cpp; AssertionError names the first that differs."""
    data, tried = read_data(), texts(3, NUM_TRIED)
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            model = write_model(Path(folder) / f"{name}.gguf", keys_of(name, data))
            ours = HfTokenizer.from_gguf(model)
            for text, ids in zip(tried, ids_by_llama_cpp(python, model, tried), strict=True):
                assert ours.encode(text) == ids, (name, text)
    return {"names": len(NAMES), "texts": NUM_TRIED}


def write(python: Path = PYTHON) -> None:
    """Write the committed data again."""
    data = {**_trained(), "texts": texts(0, NUM_COMMITTED), "ids": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            model = write_model(Path(folder) / f"{name}.gguf", keys_of(name, data))
            data["ids"][name] = ids_by_llama_cpp(python, model, data["texts"])
    content = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    DATA.write_bytes(gzip.compress(content.encode(), mtime=0))


def _trained() -> dict[str, Any]:
    """Return two vocabularies whose merges cross every boundary, since they are trained on unsplit lines."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    corpus = [(ROOT / "docs" / "architecture.md").read_text(), *CORPUS_LINES * 30]
    chunks = pre_tokenizers.Split(Regex(r"[\s\S]{1,24}"), "isolated")
    letters = Tokenizer(models.BPE())
    letters.pre_tokenizer = pre_tokenizers.Sequence([chunks, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=1500, max_token_length=10, initial_alphabet=alphabet)
    )
    words = Tokenizer(models.BPE())
    words.normalizer = normalizers.Replace(" ", "\u2581")
    words.pre_tokenizer = chunks
    words.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=1200, max_token_length=10))
    vocabulary = words.get_vocab()
    pieces = sorted(vocabulary, key=lambda piece: (len(piece) == 1, vocabulary[piece]))
    return {"merges": json.loads(letters.to_str())["model"]["merges"], "pieces": pieces}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="make the committed data anew")
    parser.add_argument("--python", type=Path, default=PYTHON, help="a Python that has xllamacpp")
    args = parser.parse_args()
    if args.write:
        write(args.python)
    else:
        print(json.dumps(compare(args.python)))
