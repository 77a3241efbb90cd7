"""YAML is read by YAML 1.2; duplicate keys and ambiguous values are refused with their line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from floodplain.cli.sources import read_config_file
from floodplain.core.errors import UserError
from floodplain.files.yaml_file import read_yaml_mapping
from tests.support.examples import examples

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
