"""States of a group: the table, stale events, and the diagram in the design note."""

from __future__ import annotations

from pathlib import Path

import pytest

from floodplain.cluster.wire.group_messages import STEPS
from floodplain.core.errors import InvariantError
from floodplain.core.groups import STALE, TABLE, GroupEvent, GroupState, advance

DESIGN = Path(__file__).parents[2] / "docs" / "design" / "018-drop-and-restore.md"
ENDS = {GroupState.SOLO, GroupState.OVER}


def diagram() -> str:
    """Return the table as a mermaid state diagram."""
    labels: dict[tuple[GroupState, GroupState], list[str]] = {}
    for (begin, event), end in TABLE.items():
        labels.setdefault((begin, end), []).append(event)
    arrows = [f"    {begin.name} --> {end.name}: {', '.join(events)}" for (begin, end), events in labels.items()]
    return "\n".join(
        ["stateDiagram-v2", f"    [*] --> {GroupState.SOLO.name}", *arrows, f"    {GroupState.OVER.name} --> [*]"]
    )


def test_diagram_in_the_design_note_is_the_table() -> None:
    assert f"```mermaid\n{diagram()}\n```" in DESIGN.read_text()


def test_events_outside_the_table_are_stale_or_impossible() -> None:
    for state in GroupState:
        for event in GroupEvent:
            if (state, event) in TABLE:
                assert advance(state, event) is TABLE[state, event]
            elif event in STALE:
                assert advance(state, event) is None
            else:
                with pytest.raises(InvariantError, match=state):
                    advance(state, event)


def test_only_a_group_that_has_dropped_nothing_can_be_cancelled() -> None:
    assert [state for state in GroupState if advance(state, GroupEvent.CANCELLED)] == [GroupState.PREPARING]
    undone = {begin for (begin, event), end in TABLE.items() if end is GroupState.SOLO and event in STALE}
    assert undone == {GroupState.PREPARING}


def test_undisturbed_group_visits_every_state_once_and_ends_solo() -> None:
    disturbing = STALE | {GroupEvent.ENDED}
    path = [GroupState.SOLO]
    while len(path) == 1 or path[-1] is not GroupState.SOLO:
        (after,) = [end for (begin, event), end in TABLE.items() if begin is path[-1] and event not in disturbing]
        path.append(after)
        assert len(path) <= len(GroupState)
    assert sorted(path[1:]) == sorted(set(GroupState) - {GroupState.OVER})


def test_a_member_may_end_in_every_state_of_a_group() -> None:
    grouped = set(GroupState) - ENDS
    assert {begin for begin, event in TABLE if event is GroupEvent.ENDED} == grouped == set(STEPS)


def test_steps_end_by_the_event_of_the_table() -> None:
    for state, step in STEPS.items():
        assert step.event is None or (state, step.event) in TABLE
