"""Checks of which instances may form a group."""

from __future__ import annotations

from collections.abc import Sequence

from floodplain.cluster.state.roster import Roster
from floodplain.core.errors import UserError

MIN_MEMBERS, MAX_MEMBERS = 2, 4


def check_members(epochs: Sequence[int]) -> None:
    """Check that a group may have so many instances, each named once.

    Raises:
        UserError: They are not, or one is named twice.
    """
    if not MIN_MEMBERS <= len(epochs) <= MAX_MEMBERS or len(set(epochs)) < len(epochs):
        raise UserError(f"a group has {MIN_MEMBERS} to {MAX_MEMBERS} different instances: name so many")


def find_max_model_len(roster: Roster, epochs: Sequence[int], num_layers: int) -> int:
    """Most tokens of a request in a group of these instances: the least of what each can hold alone.

    Args:
        roster: Of the router.
        epochs: Of the instances.
        num_layers: Of the model.

    Raises:
        UserError: They cannot be a group.
    """
    check_members(epochs)
    facts = []
    for epoch in epochs:
        instance = roster.get(epoch)
        if instance is None or not instance.can_drop or instance.is_leaving:
            raise UserError(f"instance {roster.name_of(epoch)} cannot drop layers: start the front with --relief")
        facts.append(instance.facts)
    if num_layers < len(epochs):
        raise UserError(f"{num_layers} layers cannot be shared by {len(epochs)} instances: name fewer")
    return min(one.max_model_len for one in facts)
