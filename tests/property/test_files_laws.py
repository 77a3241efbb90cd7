"""A file of any kind with any bytes is read, or refused in one line that names it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from tests.support.examples import examples
from tests.support.tiny_files import Kind, tiny_files

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
