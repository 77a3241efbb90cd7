"""The router's side of pipelines: sends stages that joined the addresses of the neighbours to link with.

A pipeline is formed when all of its stages have joined, and serves when all are linked. When the session of one ends,
the others end, too: the KV of its layers is lost. They join again, with their parameters.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from floodplain.cluster.state.roster import Instance, Roster
from floodplain.cluster.wire.messages import Form, Formed, Hello, InstanceFacts, find_difference
from floodplain.cluster.wire.stage_link import SECRET_BYTES
from floodplain.core.errors import InvariantError


@dataclass(eq=False, slots=True)
class Pipeline:
    """One pipeline: its members by stage, the leader first, and those that are linked with both neighbours."""

    number: int
    epochs: tuple[int, ...]
    linked: set[int] = field(default_factory=set)


logger = logging.getLogger(__name__)


class Forming:
    """The joined stages of a roster, and the pipelines that they form.

    ``max_model_len`` is that of the last pipeline that was linked, in tokens; None before the first.
    """

    def __init__(self, num_stages: int, roster: Roster, send: Callable[[int, Form], None]) -> None:
        self.num_stages = num_stages
        self.max_model_len: int | None = None
        self._roster, self._send = roster, send
        self._gathered: dict[int, int] = {}
        self._pipelines: dict[int, Pipeline] = {}
        self._next_number = 1

    @property
    def pipelines(self) -> list[Pipeline]:
        """The pipelines that were formed and have not ended."""
        return list(self._pipelines.values())

    def join(self, instance: Instance) -> int | None:
        """A stage joined; after the last one all are ordered to link. The epoch of an older one, which must end."""
        assert instance.stage is not None
        older = self._gathered.get(instance.stage.stage)
        self._gathered[instance.stage.stage] = instance.epoch
        if len(self._gathered) == self.num_stages:
            epochs = tuple(self._gathered[stage] for stage in range(self.num_stages))
            self._gathered.clear()
            number, self._next_number = self._next_number, self._next_number + 1
            self._pipelines[number] = Pipeline(number, epochs)
            self._tell(number, [self._roster.expect(epoch) for epoch in epochs])
        return older

    def link(self, message: Formed) -> bool:
        """A stage is linked. True if its whole pipeline is linked now; False, too, if it has ended."""
        pipeline = self._pipelines.get(message.number)
        if pipeline is None or message.epoch not in pipeline.epochs or message.epoch in pipeline.linked:
            return False
        pipeline.linked.add(message.epoch)
        if len(pipeline.linked) < len(pipeline.epochs):
            return False
        members = [self._roster.expect(epoch) for epoch in pipeline.epochs]
        for member in members:
            member.is_linked = True
        members[0].num_blocks = min(member.facts.num_blocks for member in members)
        self.max_model_len = min(member.facts.max_model_len for member in members)
        logger.info("instances %s are pipeline %d", ", ".join(member.name for member in members), pipeline.number)
        return True

    def end(self, epoch: int) -> list[int]:
        """An instance's session has ended. The epochs of the other members of its pipeline, last stage first."""
        self._gathered = {stage: other for stage, other in self._gathered.items() if other != epoch}
        ended = [pipeline for pipeline in self._pipelines.values() if epoch in pipeline.epochs]
        for pipeline in ended:
            del self._pipelines[pipeline.number]
        return [other for pipeline in ended for other in reversed(pipeline.epochs) if other != epoch]

    def check_integrity(self) -> None:
        """Raise ``InvariantError`` if an epoch is in two places."""
        placed = [*self._gathered.values(), *(epoch for one in self._pipelines.values() for epoch in one.epochs)]
        if len(placed) != len(set(placed)):
            raise InvariantError("a stage is in two pipelines, or in one and waiting for one")

    def _tell(self, number: int, members: list[Instance]) -> None:
        secret = secrets.token_hex(SECRET_BYTES)
        for member, following in zip(members, members[1:] + members[:1], strict=True):
            assert following.stage is not None
            form = Form(
                epoch=member.epoch,
                number=number,
                secret=secret,
                num_blocks=min(one.facts.num_blocks for one in members),
                max_model_len=min(one.facts.max_model_len for one in members),
                host=following.stage.host,
                port=following.stage.port,
            )
            self._send(member.epoch, form)


def find_problem(hello: Hello, slot: int | None, first: InstanceFacts | None, forming: Forming | None) -> str | None:
    """Why an instance is refused, and what to change; None if it is admitted.

    ``slot`` is None if it was started elsewhere, ``first`` if no instance has joined, ``forming`` without pipelines.
    """
    stage, first = hello.stage, first or hello.facts
    if stage is None:
        return find_difference(first, hello.facts)
    if forming is None or slot != stage.stage or stage.num_stages != forming.num_stages:
        return "the stages of a pipeline are the router's own: start this instance without --stage"
    return find_difference(replace(first, max_model_len=0), hello.facts)  # stages may differ in that
