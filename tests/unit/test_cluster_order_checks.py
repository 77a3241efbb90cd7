"""Checks of a router's orders: a valid order passes, and an order with one wrong field is refused."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from floodplain import SamplingParams
from floodplain.cluster.state.row_checks import check_moves
from floodplain.cluster.wire.group_messages import Adopt, Collect, Drop, Fetch, Fill, HeldRequest, Move, Return
from floodplain.cluster.wire.messages import Form, GoOn, PullKv
from floodplain.cluster.wire.order_checks import check_form, check_order
from floodplain.cluster.wire.placements import Submit
from floodplain.core.codec import WireError
from floodplain.core.request import NO_GOALS

NUM_LAYERS, EPOCH = 4, 7
SECRET, ADDRESS = "5e" * 32, "127.0.0.1:9"
ADDRESSES = (ADDRESS,) * NUM_LAYERS
SUBMIT = Submit(
    epoch=EPOCH, ticket=1, request_id="a", num_prompt=2, params=SamplingParams(), age_s=0.0, priority=0, client="",
    cache_salt="", session="", goals=NO_GOALS, is_accepted=True, choice_group=0,
)  # fmt: skip
HELD = (HeldRequest(1, 0, 2), HeldRequest(2, 1, 1))
DROP = Drop(
    epoch=EPOCH, number=1, place=1, num_members=2, first_layer=2, end_layer=4, num_used=2, first_quantum=0,
    num_quanta=3, max_model_len=64, secret=SECRET, host="127.0.0.1", port=9, held=HELD,
)  # fmt: skip
FETCH = Fetch(EPOCH, 1, (ADDRESS, ADDRESS), ((0,) * NUM_LAYERS, (1,) * NUM_LAYERS), HELD)
COLLECT = Collect(EPOCH, 1, ADDRESSES, HELD)
ADOPT, GO_ON = Adopt(EPOCH, 1, 1, 2, SUBMIT), GoOn(EPOCH, 1, 2, SUBMIT)
FORM = Form(EPOCH, 1, SECRET, 10, 64, "127.0.0.1", 9)
RIGHT: list[tuple[Any, list[int]]] = [
    (SUBMIT, [5, 6, 7]), (ADOPT, [5, 6, 7]), (GO_ON, [5, 6, 7]), (DROP, [0, 1, 4, 5, 6]),
    (FETCH, [4, 5, 6, 4, 5, 6]), (COLLECT, [4, 5, 6]), (Fill(EPOCH, 1, ADDRESSES), []),
    (Move(EPOCH, 1, 2), [0, 1, 2, 3, 9]), (Return(EPOCH, 1), [0, 2]), (PullKv(EPOCH, 1, ADDRESS, SECRET), [0, 2]),
    (FORM, []), (FETCH, [4, 5, 6, 4, -2, -1]),
]  # fmt: skip
"""A negative source of a copy is a slot of swap space."""
WRONG_FIELDS: list[tuple[Any, dict[str, Any]]] = [
    (SUBMIT, {"num_prompt": 0}),
    (SUBMIT, {"num_prompt": 4}),
    (ADOPT, {"num_computed": 3}),
    (ADOPT, {"epoch": 8}),
    (ADOPT, {"submit": replace(SUBMIT, num_prompt=4)}),
    (GO_ON, {"num_computed": 3}),
    (GO_ON, {"epoch": 8}),
    (DROP, {"end_layer": 5}),
    (DROP, {"first_layer": 4}),
    (DROP, {"place": 2}),
    (DROP, {"num_quanta": 0}),
    (DROP, {"num_used": 1}),
    (DROP, {"held": HELD[:1]}),
    (FETCH, {"addresses": (ADDRESS,)}),
    (FETCH, {"sources": ((0,) * NUM_LAYERS,)}),
    (FETCH, {"sources": ((0,) * NUM_LAYERS, (1,) * 3)}),
    (FETCH, {"sources": ((0,) * NUM_LAYERS, (2,) * NUM_LAYERS)}),
    (FETCH, {"held": (HELD[0], HeldRequest(2, 2, 1))}),
    (FETCH, {"held": HELD[:1]}),
    (COLLECT, {"addresses": ADDRESSES[1:]}),
    (COLLECT, {"held": HELD[:1]}),
    (Fill(EPOCH, 1, ADDRESSES), {"addresses": ADDRESSES[1:]}),
    (Move(EPOCH, 1, 2), {"num_moves": 3}),
    (FORM, {"num_blocks": 11}),
    (FORM, {"max_model_len": 65}),
]


def check(order: Any, integers: list[int], tickets: Collection[int] = ()) -> None:
    check_order(order, integers, tickets, NUM_LAYERS)
    if isinstance(order, Form):
        check_form(order, num_blocks=10, max_model_len=64)


@pytest.mark.parametrize(("order", "integers"), RIGHT, ids=lambda each: type(each).__name__)
def test_an_order_that_fits_passes_and_none_with_a_negative_integer(order: Any, integers: list[int]) -> None:
    check(order, integers)
    if integers:
        with pytest.raises(WireError, match="below zero"):
            check(order, [-1, *integers[1:]])


@pytest.mark.parametrize(("order", "wrong"), WRONG_FIELDS, ids=lambda each: str(each)[:40])
def test_one_wrong_field_is_refused(order: Any, wrong: dict[str, Any]) -> None:
    integers = next(integers for right, integers in RIGHT if right == order)
    with pytest.raises(WireError):
        check(replace(order, **wrong), integers)


@pytest.mark.parametrize("order", [SUBMIT, ADOPT, GO_ON])
def test_a_ticket_that_comes_twice_is_refused(order: Any) -> None:
    with pytest.raises(WireError, match="twice"):
        check(order, [5, 6, 7], tickets=(1, 3))


@pytest.mark.parametrize("wrong", [[0], [0, 12, 2], [-1, 3, 2], [0, 0, 2], [0, 3, 3], [0, 3, -1], [0, 3, 1, 1]])
def test_a_shrink_moves_blocks_of_the_pool_once_and_unmaps_its_quanta(wrong: list[int]) -> None:
    check_moves(1, [0, 11, 0, 2], num_quanta=3, quantum_blocks=4)
    with pytest.raises(WireError):
        check_moves(1, wrong, num_quanta=3, quantum_blocks=4)
