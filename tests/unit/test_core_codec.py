"""Dataclasses as JSON: every supported type is read as it was written, and an error names its field."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, NewType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core import codec
from floodplain.core.codec import WireError, from_json, to_json
from floodplain.core.errors import UserError
from floodplain.core.ranges import ADDED, Length, Pattern, Range

Ticket = NewType("Ticket", str)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Inner:
    number: Annotated[int, Range(0, 9)]
    name: Annotated[str, Pattern("[a-z]{1,3}")] | None = None

    def __post_init__(self) -> None:
        if self.number == 7:
            raise UserError("7 is taken")


@dataclass(frozen=True, slots=True)
class Whole:
    ticket: Annotated[Ticket, Pattern("t[0-9]+")]
    colour: Colour
    seconds: float
    is_last: bool
    inner: Inner
    maybe: Inner | None
    many: Annotated[tuple[Inner, ...], Length(3)]
    pair: tuple[int, float]
    by_name: Mapping[str, Inner]
    by_pair: dict[tuple[str, str], int] = field(default_factory=dict)
    later: Annotated[int, ADDED] = 5


inners = st.builds(
    Inner, st.integers(0, 9).filter(lambda number: number != 7), st.none() | st.from_regex("[a-z]{1,3}", fullmatch=True)
)
wholes = st.builds(
    Whole,
    ticket=st.integers(0, 99).map(lambda number: Ticket(f"t{number}")),
    colour=st.sampled_from(Colour),
    seconds=st.floats(0, 1e9),
    is_last=st.booleans(),
    inner=inners,
    maybe=st.none() | inners,
    many=st.lists(inners, max_size=3).map(tuple),
    pair=st.tuples(st.integers(0, 9), st.floats(0, 9)),
    by_name=st.dictionaries(st.text(max_size=3), inners, max_size=2),
    by_pair=st.dictionaries(st.tuples(st.text(max_size=2), st.text(max_size=2)), st.integers(0, 9), max_size=2),
    later=st.integers(0, 9),
)
ONE = Whole(
    Ticket("t1"), Colour.RED, 1.5, True, Inner(1), None, (Inner(2),), (1, 2.0), {"a": Inner(3)}, {("b", "c"): 4}
)


def is_read_as_written(whole: Whole) -> bool:
    """Whether values and types survive: a string enum equals its text, and an int may equal a float."""
    read = from_json(Whole, json.loads(json.dumps(to_json(whole), allow_nan=False)))
    return read == whole and repr(read) == repr(whole)


@given(wholes)
def test_every_type_is_read_as_it_was_written(whole: Whole) -> None:
    assert is_read_as_written(whole)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (dict, lambda value: {}),
        (int, lambda value: value + 1),
        (float, int),
        (str, str.title),
        (bool, int),
    ],
    ids=lambda value: value.__name__,
)
def test_a_changed_value_of_any_type_is_noticed(
    kind: type, change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the round trip."""
    check = codec._check

    def damage(value: Any, kinds: tuple[type, ...], bounds: tuple[Any, ...]) -> Any:
        checked = check(value, kinds, bounds)
        return change(checked) if kinds[0] is kind else checked

    monkeypatch.setattr(codec, "_check", damage)
    with suppress(WireError, KeyError):
        assert not is_read_as_written(ONE)


def test_json_has_plain_values_alone() -> None:
    written = to_json(ONE)
    assert type(written["colour"]) is str and written["by_pair"] == [["b", "c", 4]]
    assert written["many"] == [{"number": 2, "name": None}] and written["pair"] == [1, 2.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ticket": "x"}, "Whole.ticket is not a string like t[0-9]+"),
        ({"colour": "green"}, "Whole.colour is none of red, blue"),
        ({"seconds": "1"}, "Whole.seconds is not of type float"),
        ({"seconds": float("nan")}, "Whole.seconds is not from 0 to 1e+12"),
        ({"is_last": 1}, "Whole.is_last is not of type bool"),
        ({"inner": {"number": True, "name": None}}, "Whole.inner.number is not of type int"),
        ({"inner": {"number": 10, "name": None}}, "Whole.inner.number is not from 0 to 9"),
        ({"inner": {"number": 7, "name": None}}, "Whole.inner: 7 is taken"),
        ({"maybe": []}, "Whole.maybe is not of type object"),
        ({"maybe": {"name": None}}, "Whole.maybe lacks number"),
        ({"maybe": {"number": 1, "name": None, "x" * 999: 1}}, "Whole.maybe has a field that is none of number, name"),
        ({"many": {}}, "Whole.many is not of type list"),
        ({"many": [{"number": 1, "name": None}] * 4}, "Whole.many is more than 3 items"),
        ({"many": [{"number": 1, "name": "A"}]}, "Whole.many[0].name is not a string like [a-z]{1,3}"),
        ({"pair": [1]}, "Whole.pair has 1 items, not 2"),
        ({"by_name": []}, "Whole.by_name is not of type object"),
        ({"by_pair": [["b", 4]]}, "Whole.by_pair[0] has 2 items, not 3"),
        ({"later": -1}, "Whole.later is not from 0 to 9.22337e+18"),
        ({"pair": [1, "2"]}, "Whole.pair[1] is not of type float"),
        ({"by_pair": [["b", "c", 4], ["b", 5, 4]]}, "Whole.by_pair[1][1] is not of type str"),
        (
            {"more": 1},
            "Whole has a field that is none of ticket, colour, seconds, is_last, inner, maybe, many, pair, by_name, "
            "by_pair, later",
        ),
    ],
)
def test_an_error_names_its_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError) as caught:
        from_json(Whole, to_json(ONE) | change)
    assert str(caught.value) == message


def test_open_objects_may_have_more_fields_and_lack_added_ones() -> None:
    written = to_json(replace(ONE, later=9))
    assert from_json(Whole, written | {"more": 1}, is_open=True) == replace(ONE, later=9)
    del written["later"]
    assert from_json(Whole, written, is_open=True) == ONE
    with pytest.raises(WireError):
        from_json(Whole, written)
    del written["by_pair"]  # it has a default, too, but is not marked
    with pytest.raises(WireError):
        from_json(Whole, written, is_open=True)
