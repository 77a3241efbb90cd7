"""One pipeline stage as a ``Member``: it keeps its layers, and opens new links whenever a pipeline is formed.

The first stage leads: it has the step loop and gets the requests. When a link or the connection to the router ends,
the pipeline ends, and its requests resume elsewhere from their tokens.
"""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path
from typing import cast

from floodplain.cluster.instance.instance import own_facts
from floodplain.cluster.instance.session import Role, Session
from floodplain.cluster.pipeline.stage import PipelineStage, plan_limits, read_price
from floodplain.cluster.wire.messages import Form, Formed, Hello, StageFacts
from floodplain.cluster.wire.order_checks import check_form
from floodplain.core.codec import WireError
from floodplain.cost.pipeline import ChunkPrice, cost_by_shape
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.compute_threads import release_compute_threads
from floodplain.engine.config import EngineConfig
from floodplain.engine.stage_build import Stage, build_stage
from floodplain.engine.step_meter import StepMeter
from floodplain.policy.microbatch import MicrobatchRule, Split
from floodplain.web.address import bind

LINK_HOST = "127.0.0.1"
"""Address at which stages listen for each other: the router starts all of them on its own machine."""


class StageMember:
    """A ``Member`` that holds the layers of stage ``place``, from 0; ``rule`` says how the leader divides work."""

    engine: AsyncEngine | None = None

    def __init__(self, stage: Stage, place: int, num_stages: int, rule: MicrobatchRule) -> None:
        self.stage, self.place, self.num_stages, self.rule = stage, place, num_stages, rule
        self.listener: socket.socket = bind(LINK_HOST, 0)

    async def start(self) -> None:
        """Listen for the stage before. Releases this thread's compute threads to the thread that computes."""
        release_compute_threads()
        self.listener.listen()
        self.listener.setblocking(False)

    async def close(self) -> None:
        """Close the listener and the stage."""
        self.listener.close()
        self.stage.close()

    async def rest(self) -> None:
        """Return at once: when a session of a stage ends, its thread has ended."""

    def hello(self, token: str) -> Hello:
        """The ``Hello`` of this stage: its facts, its place, and the address at which it listens."""
        stage, (host, port) = self.stage, self.listener.getsockname()[:2]
        facts = own_facts(
            stage.parts.fingerprint, stage.config, stage.max_model_len, stage.config.block_tokens, stage.num_blocks
        )
        return Hello(token, facts, StageFacts(self.place, self.num_stages, host, port))

    def open_role(self, session: Session) -> Role:
        """What this stage does in a session."""
        return _StageRole(session, self)


def open_stage(config: EngineConfig, place: int, num_stages: int, split: str, step_profile: Path | None) -> StageMember:
    """Load the stage ``place``, from 0. Without a ``step_profile`` the model's shape says what work costs.

    Raises ``UserError`` as ``build_stage`` and ``read_price``.
    """
    price = None if step_profile is None else read_price(step_profile, None if place else config)  # one stage warns
    stage = build_stage(config, place, num_stages)
    rule = MicrobatchRule(cast(Split, split), price or ChunkPrice(cost_by_shape(stage.parts.shape)))
    return StageMember(stage, place, num_stages, rule)


class _StageRole(Role):
    """A stage in one session, in which it is a member of at most one pipeline."""

    orders = (Form,)
    peers = "pipeline"

    def __init__(self, session: Session, member: StageMember) -> None:
        super().__init__(session)
        self._member = member
        self._stage: PipelineStage | None = None

    def obey(self, order: Form, integers: tuple[int, ...]) -> None:
        if self._stage is not None:
            raise WireError("it forms a second pipeline of this stage")
        member, parts = self._member, self._member.stage.parts
        check_form(order, member.stage.num_blocks, member.stage.max_model_len)
        limits = plan_limits(parts, order.num_blocks, order.max_model_len)
        self._stage = PipelineStage(parts, member.listener, order, member.place, member.num_stages, limits, member.rule)
        self._session.start(self._form(self._stage, order))

    def meter(self) -> StepMeter | None:
        return None if self._stage is None else self._stage.meter

    def find_failure(self) -> BaseException | None:
        return None if self._stage is None else self._stage.failure

    async def end(self) -> None:
        if self._stage is not None:
            await self._stage.close()

    async def _form(self, stage: PipelineStage, form: Form) -> None:
        own = self._member.stage
        await stage.open(partial(own.make_runner, form.max_model_len), partial(own.make_ledger, form.num_blocks))
        self._session.engine = stage.engine
        self._session.send(Formed(self._session.epoch, form.number))
