"""An instance with a whole model: its engine computes requests of the front, and has no clients of its own."""

from __future__ import annotations

import asyncio
import os
import platform

from floodplain import __version__
from floodplain.cluster.instance.life import Life
from floodplain.cluster.wire.facts import InstanceFacts
from floodplain.cluster.wire.frames import FrameLink
from floodplain.cluster.wire.messages import Hello, Welcome
from floodplain.engine.async_engine import AsyncEngine


class Replica:
    """A ``Member`` with a whole model.

    Args:
        engine: The engine, not yet started.

    Attributes:
        engine: As above.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine

    async def start(self) -> None:
        """Start the engine."""
        await self.engine.start()

    async def close(self) -> None:
        """Close the engine."""
        await self.engine.close()

    async def rest(self) -> None:
        """Return when the engine has no step under way."""
        pause = await self.engine.pause()
        pause.release()

    def hello(self, token: str) -> Hello:
        """The ``Hello`` of this instance: its token and facts."""
        one = self.engine.engine
        ledger = one.loop.state.ledger
        facts = InstanceFacts(
            version=__version__,
            fingerprint=one.loop.state.config.fingerprint,
            dtype=one.config.dtype,
            max_model_len=one.max_model_len,
            block_tokens=ledger.block_tokens,
            num_blocks=ledger.num_blocks,
            host=platform.node(),
            pid=os.getpid(),
        )
        return Hello(token, facts)

    async def live(self, link: FrameLink, welcome: Welcome, is_stopping: asyncio.Event, drain_timeout_s: float) -> None:
        """Serve one life: requests of the front until the connection ends or the process is to stop."""
        await Life(link, welcome, self.engine).run(is_stopping, drain_timeout_s)
