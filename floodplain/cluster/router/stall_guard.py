"""Finds a router's stuck instances: feeds ``StallWatch`` with beats and with the units that compute together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from floodplain.cluster.groups.controller import GroupController
from floodplain.cluster.pipeline.forming import Forming
from floodplain.cluster.router.stalls import StallWatch, Stuck
from floodplain.cluster.state.roster import Instance, Roster
from floodplain.core.groups import GroupState
from floodplain.engine.step_meter import Progress


class StallGuard:
    """Finds a router's stuck instances.

    Args:
        watch: Decides which instances are stuck.
        roster: Of the router.
        forming: The router's pipelines; None if it has none.
        group_controller: The router's groups; None if it has none.
    """

    def __init__(
        self, watch: StallWatch, roster: Roster, forming: Forming | None, group_controller: GroupController | None
    ) -> None:
        self._watch, self._roster = watch, roster
        self._forming, self._group_controller = forming, group_controller

    def hear(self, instance: Instance, progress: Progress, now: float) -> None:
        """Note a beat of an instance."""
        self._watch.hear(instance.epoch, progress, now, owes=self._owes(instance))

    def find_stuck(self) -> Iterator[Stuck]:
        """The live instances that are stuck. The caller may end lives during the iteration."""
        self._watch.keep({one.epoch for one in self._roster})
        return (stuck for stuck in self._watch.find_stuck(self._units()) if self._roster.get(stuck.epoch) is not None)

    def _units(self) -> list[Sequence[int]]:
        units: list[Sequence[int]] = []
        if self._forming is not None:
            units += [pipeline.epochs for pipeline in self._forming.pipelines]
        if self._group_controller is not None:
            units += [group.epochs for group in self._group_controller.groups]
        shared = {epoch for unit in units for epoch in unit}
        return [*units, *((one.epoch,) for one in self._roster if one.epoch not in shared)]

    def _owes(self, instance: Instance) -> bool:
        """Whether it has requests, and no change of its group, which has its own timers, delays it."""
        group = None if self._group_controller is None else self._group_controller.groups.find(instance.epoch)
        return bool(instance.tickets) and (group is None or group.state is GroupState.PIPELINED)
