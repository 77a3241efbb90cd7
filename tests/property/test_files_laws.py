"""A file of any kind with any bytes is read, or refused in one line that names it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from floodplain.cli.sources import read_config_file
from floodplain.coordinator.placement import read_pairs
from floodplain.coordinator.tokens import TokenRing
from floodplain.core.errors import UserError
from floodplain.cost.model_shape import shape_named
from floodplain.files.profile import Profile, read_profile
from floodplain.files.yaml_file import read_yaml_mapping
from floodplain.model.network.config import ModelConfig
from floodplain.model.network.load import parameter_parts
from floodplain.model.weights.open_model import open_model
from floodplain.planner.inputs import read_cluster
from floodplain.planner.placement import read_spots
from floodplain.server.auth import read_keys
from floodplain.workload.arrivals import load_lengths
from floodplain.workload.prompts import load_prompts
from floodplain.workload.traces import load_trace
from tests.support.examples import examples
from tests.support.gguf_files import gguf_keys, gguf_tensors, write_gguf_file

MODEL = ModelConfig.of_shape(
    replace(
        shape_named("tiny-llama"), num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn_size=16
    )
)


_TALK = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


_CLUSTER = b"""servers: [{name: a, count: 2, gpus: 2, memory: 80GB, link: 450GB}]
models: [{name: m, lends: 20GB, servers: [a-0]}, {name: n, needs: 20GB}]
apart: [[m, n]]
within: 0.1
"""
_PLACEMENT = {
    "kind": "floodplain placement",
    "version": 1,
    "servers": [{"name": "a-0", "units": [{"model": "m", "instance": 0, "stage": 0, "gpus": [0]}]}],
    "pairs": [{"producer": "a-0-gpu0", "consumer": "a-0-gpu1"}],
}
_PROFILE = Profile(
    kind="swap", subject="m", machine="a laptop", settings={}, result={"stable_rate_rps": 2.5, "needs_bytes": 2**30}
).to_json()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file.

    Attributes:
        content: Of a valid file.
        read: Reads the file at a path, and uses its content once.
        name: Of the file, in a folder of its own.
        beside: Other files of the folder.
    """

    content: bytes = field(repr=False)
    read: Callable[[Path], object] = field(repr=False)
    name: str
    beside: Mapping[str, bytes] = field(repr=False)


def tiny_files(scratch: Path) -> dict[str, Kind]:
    """Return every kind, by its name; ``scratch`` is an empty folder."""
    folder = _model_folder()
    model_files = {
        name: Kind(content, lambda path: _use(path.parent), name, {n: c for n, c in folder.items() if n != name})
        for name, content in folder.items()
    }
    mooncake = {"timestamp": 0, "input_length": 4, "output_length": 2, "hash_ids": [1, 2]}
    tables: dict[str, tuple[bytes, Callable[[Path], object]]] = {
        "trace.csv": (b"t_s,prompt_tokens,output_tokens\n0,4,2\n1.5,7,3\n", load_trace),
        "azure.csv": (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4,2\n", load_trace),
        "trace.jsonl": (json.dumps(mooncake).encode() + b"\n", load_trace),
        "lengths.csv": (b"prompt_tokens,output_tokens\n4,2\n", load_lengths),
        "prompts.jsonl": (b'{"prompt": "Hi", "output_tokens": 3}\n', load_prompts),
        "sharegpt.json": (json.dumps([{"id": "a", "conversations": _TALK}]).encode(), load_prompts),
        "session.jsonl": (b'{"session_id": "s", "input_length": 4, "output_length": 2, "timestamp": 5}\n', load_trace),
        "keys": (b"alice secret-key-1 2\nsecret-key-2\n", read_keys),
        "tokens": (b"admin * secret-token\n", TokenRing.from_file),
        "config.yaml": (b"port: 8000\ngoodput: [a, b]\nquiet: true\n", read_config_file),
        "cluster.yaml": (_CLUSTER, read_cluster),
        "profile.json": (json.dumps(_PROFILE).encode(), read_profile),
        "placement.json": (json.dumps(_PLACEMENT).encode(), _use_placement),
    }
    model_files["m.gguf"] = Kind(_gguf_file(scratch / "m.gguf"), _use, "m.gguf", {})
    return model_files | {name: Kind(content, read, name, {}) for name, (content, read) in tables.items()}


def _use(path: Path) -> None:
    """Open a model, read all of its weights, and encode a text."""
    source = open_model(str(path))
    for part in parameter_parts(source.config):
        source.fill(torch.empty(part.shape), part.name)
    tokenizer = source.load_tokenizer()
    tokenizer.decode(tokenizer.encode("the river"))


def _use_placement(path: Path) -> None:
    """Read the parts of a placement that a coordinator and a new placement need."""
    read_pairs(path)
    read_spots(path)


def _model_folder() -> dict[str, bytes]:
    shape = MODEL.shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": MODEL.norm_eps,
        "eos_token_id": 2,
    }
    weights = _weights()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "!", "model_max_length": 100}
    return {
        "config.json": json.dumps(config).encode(),
        "generation_config.json": b'{"eos_token_id": [1, 2]}',
        "model.safetensors.index.json": json.dumps({"weight_map": dict.fromkeys(weights, "w.safetensors")}).encode(),
        "w.safetensors": save(weights),
        "tokenizer.json": _byte_level().to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
    }


def _weights() -> dict[str, torch.Tensor]:
    return {part.name: torch.full(part.shape, 0.5) for part in parameter_parts(MODEL)}


def _byte_level() -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return backend


def _gguf_file(path: Path) -> bytes:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "th", *(f"<pad{number}>" for number in range(MODEL.shape.vocab_size - len(letters) - 1))]
    keys = {
        **gguf_keys(MODEL),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.eos_token_id": 2,
    }
    return write_gguf_file(path, keys, gguf_tensors(MODEL, _weights())).read_bytes()


HOSTILE = [
    b"", b"\0", b"\xff", b"\n", b"[", b"]" * 3, b"{", b'"', b",", b": ", b"null", b"true", b"-1", b"0", b"1e999",
    b"NaN", b"Infinity", b"9" * 5000, b"[" * 3000, b'{"a":' * 3000, b"*a", b"&a [*a]", b"!!python/none ", b"1e300",
    b"9999-12-31", b"../../etc/passwd", b"/dev/zero", struct.pack("<Q", 2**62), struct.pack("<I", 2**31),
    struct.pack("<Q", 2**64 - 1), struct.pack("<IQ", 9, 1) * 200,
]  # fmt: skip
"""Content that replaces a part of a file."""


Change = tuple[float, int, bytes]
"""(position, as a part of the length; number of bytes removed; bytes inserted)."""
CHANGES = st.lists(
    st.tuples(
        st.floats(0, 1), st.sampled_from((0, 1, 2, 4, 8, 12, 2**20)), st.sampled_from(HOSTILE) | st.binary(max_size=8)
    ),
    min_size=1,
    max_size=3,
)


def damaged(content: bytes, changes: Sequence[Change]) -> bytes:
    for place, num_bytes, replacement in changes:
        begin = int(place * len(content))
        content = content[:begin] + replacement + content[begin + num_bytes :]
    return content


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    return tiny_files(tmp_path_factory.mktemp("kinds"))


def put(kind: Kind, folder: Path, content: bytes) -> Path:
    for name, other in kind.beside.items():
        if not (folder / name).exists():
            (folder / name).write_bytes(other)
    path = folder / kind.name
    path.write_bytes(content)
    path.chmod(0o600)
    return path


NAMES = (
    "config.json", "generation_config.json", "model.safetensors.index.json", "w.safetensors", "tokenizer.json",
    "tokenizer_config.json", "m.gguf", "trace.csv", "azure.csv", "trace.jsonl", "session.jsonl", "lengths.csv",
    "prompts.jsonl", "sharegpt.json", "keys", "tokens", "config.yaml", "cluster.yaml", "placement.json", "profile.json",
)  # fmt: skip


def test_every_kind_is_read_as_it_is(kinds: dict[str, Kind], tmp_path: Path) -> None:
    assert set(kinds) == set(NAMES)
    for name, kind in kinds.items():
        (tmp_path / f"folder of {name}").mkdir()
        kind.read(put(kind, tmp_path / f"folder of {name}", kind.content))


@pytest.mark.parametrize("name", NAMES)
@given(changes=CHANGES)
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_damaged_files_are_read_or_refused_in_one_line(
    name: str, kinds: dict[str, Kind], tmp_path: Path, changes: list[Change]
) -> None:
    kind = kinds[name]
    path = put(kind, tmp_path, damaged(kind.content, changes))
    try:
        kind.read(path)
    except UserError as error:
        assert str(error).splitlines() == [str(error)]
        assert len(str(error)) < 2000


def test_the_damage_reaches_what_parsers_raise_by_themselves(kinds: dict[str, Kind]) -> None:
    """Negative control: the parsers alone raise other errors on such files."""

    def fails(parse: Callable[[bytes], object], content: bytes, changes: Sequence[Change] = ()) -> bool:
        try:
            parse(damaged(content, changes))
        except UserError:
            return False
        except Exception:  # the law forbids these
            return True
        return False

    for name, parse in (("config.json", json.loads), ("config.yaml", yaml.safe_load)):
        assert not fails(parse, kinds[name].content)
        assert find(CHANGES, partial(fails, parse, kinds[name].content))


# -- yAML is read by YAML 1.2; duplicate keys and ambiguous values are refused with their line -------------------------


TEXTS = st.text("abz019 .-_:#{}[],&*!|>'\"%@`~é", max_size=6)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8
)


def read(folder: Path, text: str) -> dict[str, Any]:
    path = folder / "f.yaml"
    path.write_text(text, encoding="utf-8")
    return read_yaml_mapping(path, 2**20, 64)


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, text)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'f.yaml'}, line ") and "\n" not in message and len(message) < 500
    return message.removeprefix(f"{folder / 'f.yaml'}, line ")


@given(content=st.dictionaries(TEXTS, VALUES, max_size=4), indent=st.none() | st.integers(1, 3))
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_json_means_in_yaml_what_it_means_in_json(content: dict[str, Any], indent: int | None, tmp_path: Path) -> None:
    """YAML 1.2 is a superset of JSON; ``repr`` distinguishes 1, 1.0 and True."""
    text = json.dumps(content, indent=indent, ensure_ascii=False)
    assert repr(read(tmp_path, text)) == repr(json.loads(text))


@given(keys=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8), depth=st.integers(0, 3))
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_key_that_stands_twice_is_named_with_both_lines(keys: list[str], depth: int, tmp_path: Path) -> None:
    outer = [f"{' ' * level}o{level}:\n" for level in range(depth)]
    text = "".join([*outer, *(f"{' ' * depth}{key}: {number}\n" for number, key in enumerate(keys))])
    second = next((place for place, key in enumerate(keys) if key in keys[:place]), None)
    if second is None:
        found = read(tmp_path, text)
        for level in range(depth):
            found = found[f"o{level}"]
        assert found == {key: number for number, key in enumerate(keys)}
    else:
        first = keys.index(keys[second])
        told = f"{depth + second + 1}: {keys[second]!r} stands in line {depth + first + 1} already"
        assert refusal(tmp_path, text).startswith(told)


MEANINGS: dict[str, Any] = {
    "yes": "yes", "No": "No", "on": "on", "OFF": "OFF", "y": "y", "true": True, "False": False, "TRUE": True,
    "null": None, "~": None, "": None, "Null": None, "nil": "nil",
    "0": 0, "-0": 0, "+12": 12, "0o17": 15, "0x1F": 31, "0b11": "0b11", "1_000": "1_000", "1:30": "1:30",
    "190:20:30": "190:20:30", "2026-11-27": "2026-11-27", "2026-11-27T10:00:00Z": "2026-11-27T10:00:00Z",
    "1e3": 1000.0, "1.": 1.0, ".5": 0.5, "-2.50": -2.5, "6.02E+23": 6.02e23, "1.5.2": "1.5.2", "0x": "0x", "=": "=",
    "'010'": "010", '"yes"': "yes", "'<<'": "<<", "80GB": "80GB", "+": "+", ".": ".", "0.010": 0.01,
}  # fmt: skip
"""Plain scalars, by section 10.3.2 of YAML 1.2.2."""


def test_a_plain_scalar_has_its_meaning_in_the_core_schema(tmp_path: Path) -> None:
    text = "".join(f"k{number}: {scalar}\n" for number, scalar in enumerate(MEANINGS))
    assert repr(list(read(tmp_path, text).values())) == repr(list(MEANINGS.values()))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\nb: 010", "2: 010 is octal to some readers"),
        ("a: -007", "1: -007 is octal"),
        ("a: [1,\n .inf]", "2: .inf is no number"),
        ("a: .NaN", "1: .NaN is no number"),
        ("a: -1e999", "1: -1e999 is no number"),
        ("a: 1\n<<: {b: 2}", "2: merge keys (<<) are not supported"),
        ("a: &x 1", "1: aliases are not supported: write the value of *x out"),
        ("a: 1\nb: *x", "2: aliases are not supported"),
        ("a: !!int '1'", "1: tags are not supported: leave !!int out"),
        ("a: !x", "1: tags are not supported: leave !x out"),
        ("!!set {a}", "1: tags are not supported"),
        ("1: x", "1: a key must be a text: put quotes around 1"),
        ("a: {~: 1}", "1: a key must be a text"),
        ("? [a]\n: b", "1: a key must be a text"),
        ("a: 1\n---\nb: 2", "2: a second document begins"),
        ("%YAML 1.1\n---\na: 1", "1: YAML 1.1 is not read"),
        ("a:\n\t- 1", "2: found character that cannot start any token"),
        ("a: 1\nb: [", "3: did not find expected node content"),
        ("'a': 1\na: 2", "2: 'a' stands in line 1 already"),
        ("a: " + "[" * 65, "1: values are nested deeper than 64 levels"),
    ],
)
def test_what_may_mean_two_things_is_refused_with_its_line(text: str, told: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, text).startswith(told)


def test_a_document_may_declare_yaml_1_2(tmp_path: Path) -> None:
    assert read(tmp_path, "%YAML 1.2\n---\na: no\n...\n") == {"a": "no"}
    assert read(tmp_path, "# nothing\n") == {}


def test_numbers_for_flags_are_kept_as_they_are_written(tmp_path: Path) -> None:
    """A model's name may be 1.10."""
    (tmp_path / "c.yaml").write_text("model: 1.10\nserved-model-name: 1e3\nport: 8000\nquiet: true\nseed: ~\n")
    assert read_config_file(tmp_path / "c.yaml") == {
        "model": "1.10", "served-model-name": "1e3", "port": "8000", "quiet": True, "seed": None,
    }  # fmt: skip
