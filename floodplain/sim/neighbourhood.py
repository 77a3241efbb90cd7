"""The instances of a scenario, the lenders beside them, and the coordinator between them, in one virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from floodplain.core.errors import InvariantError
from floodplain.core.request import Request
from floodplain.sim.answers import Answers
from floodplain.sim.environment import Environment
from floodplain.sim.fleet import Fleet
from floodplain.sim.instance import VirtualInstance
from floodplain.sim.leasing import Leasing
from floodplain.sim.machine import Machine, resolve_machine
from floodplain.sim.scenario import INSTANCE, FaultPart, Scenario

SLICE_S = 1.0
"""Seconds between two looks at whether all requests have ended: engines look at their leases until then."""
STUCK_S = 3600.0
"""Seconds without a step, while no fault or arrival is to come, after which requests wait for nothing."""


class Neighbourhood:
    """A fleet that borrows, fleets that lend to it, and the leases between them; each has its ``Answers``."""

    def __init__(self, scenario: Scenario, machine: Machine, answers: Answers, theirs: Mapping[str, Answers]) -> None:
        assert scenario.borrow is not None
        self._environment = environment = Environment()
        self.leasing = Leasing(environment, scenario.coordinator, scenario.borrow)
        self.lenders: dict[str, Fleet] = {}
        for name, part in scenario.lenders.items():
            self.lenders[name] = self._open_lender(name, part, theirs[name])

        def borrow(slot: int, instance: VirtualInstance) -> Callable[[], None]:
            return self.leasing.borrow(f"{INSTANCE}-{slot}", instance, machine.block_bytes)

        self.fleet = Fleet(scenario, machine, answers.note, environment, borrow)
        for fault in scenario.faults:
            if fault.server is not None:
                self._fail(scenario.servers[fault.server], fault)

    def serve(self, requests: Iterable[Request], of_lenders: Mapping[str, Iterable[Request]]) -> None:
        """Serve the requests of the instances and of each lender. InvariantError if they wait for ever."""
        fleets = {INSTANCE: self.fleet, **self.lenders}
        for name, load in {INSTANCE: requests, **of_lenders}.items():
            fleets[name].expect(load)
        end_s, num_steps, stuck_s = 0.0, 0.0, 0.0
        while not all(fleet.is_idle for fleet in fleets.values()):
            end_s += SLICE_S
            self._environment.run(end_s)
            before, num_steps = num_steps, sum(fleet.num_steps for fleet in fleets.values())
            is_waiting = num_steps == before and not any(fleet.expects_change for fleet in fleets.values())
            stuck_s = stuck_s + SLICE_S if is_waiting else 0.0
            if stuck_s > STUCK_S:
                raise InvariantError(f"at {end_s:g} s of the simulation requests wait, and no step can run")
        self.leasing.coordinator.is_over = True

    def _open_lender(self, group: str, part: Scenario, answers: Answers) -> Fleet:
        machine = resolve_machine(part)

        def lend(slot: int, instance: VirtualInstance) -> Callable[[], None]:
            return self.leasing.lend(f"{group}-{slot}", instance, machine.block_bytes)

        return Fleet(part, machine, answers.note, self._environment, lend)

    def _fail(self, server: Iterable[str], fault: FaultPart) -> None:
        """Have all engines of a server die, and what lenders there have lent be lost."""
        for name in server:
            group, _, slot = name.rpartition("-")
            fleet = self.fleet if group == INSTANCE else self.lenders[group]
            fleet.fail(int(slot), fault.at, fault.down)
            if group != INSTANCE:
                self._environment.schedule(fault.at, lambda name=name: self.leasing.lose(name))  # type: ignore[misc]
