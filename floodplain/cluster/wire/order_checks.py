"""Checks of a router's orders to an instance: each raises ``WireError``, which ends the connection, not the process."""

from __future__ import annotations

from collections.abc import Sequence

from floodplain.cluster.wire import group_messages as groups
from floodplain.cluster.wire.messages import Form, GoOn, MigrationOrder, PullKv
from floodplain.cluster.wire.placements import Submit
from floodplain.core.codec import WireError


def check_submit(message: Submit, token_ids: Sequence[int], taken: object) -> None:
    """Check a placement; ``taken`` is the stream that has its ticket already, or None."""
    if taken is not None:
        raise WireError("a ticket comes twice")
    if not 0 < message.num_prompt <= len(token_ids):
        raise WireError("a request has no prompt, or a longer one than it has tokens")
    _check_whole(token_ids)


def check_form(message: Form, num_blocks: int, max_model_len: int) -> None:
    """Check an order to form a pipeline, which may have at most this stage's own blocks."""
    if message.num_blocks > num_blocks or message.max_model_len > max_model_len:
        raise WireError("a pipeline is larger than its stage")


def check_migration_order(order: MigrationOrder, integers: Sequence[int], taken: object) -> None:
    """Check a migration order; arguments as in ``check_submit``."""
    if isinstance(order, PullKv):
        _check_whole(integers)
    elif isinstance(order, GoOn):
        _check_goes_on(order, integers, taken)


def check_group_order(order: groups.GroupOrder, integers: Sequence[int], taken: object, num_layers: int) -> None:
    """Check a group order and the integers beside it; ``taken`` as in ``check_submit``."""
    match order:
        case groups.Adopt():
            _check_goes_on(order, integers, taken)
        case groups.Drop():
            _check_drop(order, integers, num_layers)
        case groups.Fetch():
            _check_fetch(order, integers, num_layers)
        case groups.Fill() if len(order.addresses) != num_layers:
            raise WireError("parameters come from other layers than the model has")
        case groups.Collect():
            if len(order.addresses) != num_layers or _count_blocks(order.held) != len(integers):
                raise WireError("a copy has other layers than the model, or its blocks are not whole")
            _check_whole(integers)
        case groups.Move():
            if 2 * order.num_moves > len(integers):
                raise WireError("moves are not whole")
            _check_whole(integers)
        case groups.Return():
            _check_whole(integers)


def _check_drop(order: groups.Drop, integers: Sequence[int], num_layers: int) -> None:
    is_cut = order.first_layer < order.end_layer <= num_layers and order.place < order.num_members
    if not is_cut or not order.num_quanta or order.num_used + _count_blocks(order.held) != len(integers):
        raise WireError("a group is divided otherwise than its model, or its integers are not whole")
    _check_whole(integers)


def _check_fetch(order: groups.Fetch, integers: Sequence[int], num_layers: int) -> None:
    num_places = len(order.addresses)
    places = [place for row in order.sources for place in row] + [held.place for held in order.held]
    is_square = len(order.sources) == num_places and all(len(row) == num_layers for row in order.sources)
    if not is_square or any(place >= num_places for place in places):
        raise WireError("a copy names a place that is not there")
    num_blocks = _count_blocks(order.held)
    if 2 * num_blocks != len(integers):
        raise WireError("blocks of a copy are not whole")
    _check_whole(integers[:num_blocks])  # after them are sources; negative ones are slots


def _check_goes_on(order: groups.Adopt | GoOn, token_ids: Sequence[int], taken: object) -> None:
    check_submit(order.submit, token_ids, taken)
    if order.submit.epoch != order.epoch or order.num_computed >= len(token_ids):
        raise WireError("a request goes on from more KV than it has tokens")


def _count_blocks(held: Sequence[groups.HeldRequest]) -> int:
    return sum(one.num_blocks for one in held)


def _check_whole(integers: Sequence[int]) -> None:
    if min(integers, default=0) < 0:
        raise WireError("a token or a block is below zero")
