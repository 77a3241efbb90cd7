"""Checks of a router's orders to an instance: each raises ``WireError``, which ends the connection, not the process."""

from __future__ import annotations

from collections.abc import Container, Sequence

from floodplain.cluster.wire import group_messages as groups
from floodplain.cluster.wire.messages import Form, GoOn, RouterMessage
from floodplain.cluster.wire.placements import Submit
from floodplain.core.codec import WireError


def check_order(order: RouterMessage, integers: Sequence[int], tickets: Container[int], num_layers: int) -> None:
    """Check an order and the integers beside it. ``tickets`` are taken; ``num_layers`` are of the instance's model.

    Integers are tokens, blocks and quanta, and of ``Fetch`` also sources: only these may be negative, for slots.
    """
    match order:
        case Submit():
            _check_submit(order, integers, tickets)
        case groups.Adopt() | GoOn():
            _check_submit(order.submit, integers, tickets)
            if order.submit.epoch != order.epoch or order.num_computed >= len(integers):
                raise WireError("a request goes on from more KV than it has tokens")
        case groups.Drop():
            _check_drop(order, integers, num_layers)
        case groups.Fetch():
            _check_fetch(order, integers, num_layers)
        case groups.Fill() if len(order.addresses) != num_layers:
            raise WireError("parameters come from other layers than the model has")
        case groups.Collect() if len(order.addresses) != num_layers or _count_blocks(order.held) != len(integers):
            raise WireError("a copy has other layers than the model, or its blocks are not whole")
        case groups.Move() if 2 * order.num_moves > len(integers):
            raise WireError("moves are not whole")
    num_sources = len(integers) // 2 if isinstance(order, groups.Fetch) else 0
    if min(integers[: len(integers) - num_sources], default=0) < 0:
        raise WireError("a token or a block is below zero")


def check_form(message: Form, num_blocks: int, max_model_len: int) -> None:
    """Check an order to form a pipeline, which may have at most this stage's own blocks."""
    if message.num_blocks > num_blocks or message.max_model_len > max_model_len:
        raise WireError("a pipeline is larger than its stage")


def _check_submit(order: Submit, token_ids: Sequence[int], tickets: Container[int]) -> None:
    if order.ticket in tickets:
        raise WireError("a ticket comes twice")
    if not 0 < order.num_prompt <= len(token_ids):
        raise WireError("a request has no prompt, or a longer one than it has tokens")


def _check_drop(order: groups.Drop, integers: Sequence[int], num_layers: int) -> None:
    is_cut = order.first_layer < order.end_layer <= num_layers and order.place < order.num_members
    if not is_cut or not order.num_quanta or order.num_used + _count_blocks(order.held) != len(integers):
        raise WireError("a group is divided otherwise than its model, or its integers are not whole")


def _check_fetch(order: groups.Fetch, integers: Sequence[int], num_layers: int) -> None:
    num_places = len(order.addresses)
    places = [place for row in order.sources for place in row] + [held.place for held in order.held]
    is_square = len(order.sources) == num_places and all(len(row) == num_layers for row in order.sources)
    if not is_square or any(place >= num_places for place in places):
        raise WireError("a copy names a place that is not there")
    if 2 * _count_blocks(order.held) != len(integers):
        raise WireError("blocks of a copy are not whole")


def _count_blocks(held: Sequence[groups.HeldRequest]) -> int:
    return sum(one.num_blocks for one in held)
