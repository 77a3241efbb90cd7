"""The router's side of pipelines: tells stages that joined which neighbours to link with."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import replace

from floodplain.cluster.pipeline.pipelines import Pipeline, PipelineTable
from floodplain.cluster.state.roster import Instance, Roster
from floodplain.cluster.wire.messages import Form, Formed, Hello, InstanceFacts, find_difference
from floodplain.cluster.wire.stage_link import SECRET_BYTES

logger = logging.getLogger(__name__)


class Forming:
    """Forms pipelines of a roster's instances.

    Args:
        num_stages: Of each pipeline.
        roster: The instances.
        send: Sends a message to the instance of an epoch.

    Attributes:
        max_model_len: Most tokens of a request in the last pipeline that was linked; None before the first.
    """

    def __init__(self, num_stages: int, roster: Roster, send: Callable[[int, Form], None]) -> None:
        self.max_model_len: int | None = None
        self._pipelines = PipelineTable(num_stages)
        self._roster, self._send = roster, send

    @property
    def num_stages(self) -> int:
        """Stages of each pipeline."""
        return self._pipelines.num_stages

    @property
    def pipelines(self) -> list[Pipeline]:
        """The pipelines whose stages were told to link."""
        return self._pipelines.pipelines

    def join(self, instance: Instance) -> int | None:
        """A stage joined; if none is missing now, all are told to link.

        Returns:
            The epoch of an older instance of the same stage, whose session must end; None if there is none.
        """
        assert instance.stage is not None
        older = self._pipelines.join(instance.epoch, instance.stage.stage)
        pipeline = self._pipelines.form()
        if pipeline is not None:
            self._tell(pipeline.number, [self._roster.expect(epoch) for epoch in pipeline.epochs])
        return older

    def link(self, message: Formed) -> bool:
        """A stage is linked. True if its whole pipeline is linked now."""
        pipeline = self._pipelines.link(message.epoch, message.number)
        if pipeline is None:
            return False
        members = [self._roster.expect(epoch) for epoch in pipeline.epochs]
        for member in members:
            member.is_linked = True
        members[0].num_blocks = min(member.facts.num_blocks for member in members)
        self.max_model_len = min(member.facts.max_model_len for member in members)
        logger.info("instances %s are pipeline %d", ", ".join(member.name for member in members), pipeline.number)
        return True

    def end(self, epoch: int) -> list[int]:
        """A session has ended. The epochs of the other members of its pipeline, whose sessions end with it."""
        return self._pipelines.end(epoch)

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

    Args:
        hello: Its first message.
        slot: Its slot; None if it was started elsewhere.
        first: The facts that all instances must match; None for the first instance.
        forming: The router's pipelines; None if it has none.
    """
    stage, first = hello.stage, first or hello.facts
    if stage is None:
        return find_difference(first, hello.facts)
    if forming is None or slot != stage.stage or stage.num_stages != forming.num_stages:
        return "the stages of a pipeline are the front's own: start this instance without --stage"
    return find_difference(replace(first, max_model_len=0), hello.facts)  # stages may differ in that
