"""Links a pipeline stage with both neighbours: it accepts from the stage before, and connects to the next."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from floodplain.cluster.pipeline.device_link import RECEIVER, SENDER, Link, choose_link, describe_end, introduce
from floodplain.cluster.wire.plan_codec import PlanLimits
from floodplain.cluster.wire.stage_link import LinkKey, StageLink, accept_link, dial_link
from floodplain.core.errors import PeerLost

LINK_TIMEOUT_S = 10.0
"""A stage that is not linked with both neighbours after this time fails with ``PeerLost``."""


class StageRing:
    """The two links of one stage. ``close`` it in every case.

    Args:
        listener: The socket to which the stage before connects; it stays open.
        secret: Of the pipeline.
        number: Of the pipeline.
        place: Of this stage, from 0, and
        num_stages: of how many.
        limits: What plans may name.
        device: Of the stage's activations.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        number: int,
        place: int,
        num_stages: int,
        limits: PlanLimits,
        device: torch.device,
    ) -> None:
        self._listener, self._limits, self._device = listener, limits, device
        self._is_first, self._is_last = place == 0, place == num_stages - 1
        self._before = LinkKey(secret, number, (place - 1) % num_stages)
        self._own = LinkKey(secret, number, place)
        self._links: list[StageLink] = []
        self._threads = ThreadPoolExecutor(2, "floodplain-link-choice")  # they block on other stages: not the loop's

    async def open(self, host: str, port: int) -> tuple[Link, Link]:
        """(link from the stage before, link to the next stage).

        Args:
            host: Where the next stage listens, and
            port: on which port.

        Raises:
            PeerLost: A neighbour cannot be reached.
        """
        tasks = [asyncio.create_task(self._accept()), asyncio.create_task(self._dial(host, port))]
        try:
            async with asyncio.timeout(LINK_TIMEOUT_S):
                inbound, outbound = await asyncio.gather(*tasks)
        except TimeoutError:
            raise PeerLost(f"a neighbour in the pipeline did not link within {LINK_TIMEOUT_S:g} s") from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return inbound, outbound

    def close(self) -> None:
        """Close the links that exist. Safe to call twice; waits for their threads."""
        for link in self._links:
            link.close()
        self._threads.shutdown(wait=False)

    async def _accept(self) -> Link:
        link = await self._keep(accept_link(self._listener, self._before, self._limits.max_data_bytes))
        own_host = self._listener.getsockname()[0]
        return link if self._is_first else await self._choose(link, RECEIVER, own_host)

    async def _dial(self, host: str, port: int) -> Link:
        link = await self._keep(dial_link(host, port, self._own, self._limits.max_data_bytes))
        return link if self._is_last else await self._choose(link, SENDER, host)

    async def _choose(self, link: StageLink, rank: int, host: str) -> Link:
        """The link to use: on CPUs the given one, without exchanging facts. ``close`` ends a device link made here too,
        because it ends with its connection."""
        if not describe_end(self._device).device:
            return link
        introduce(link, self._device)
        choose = partial(choose_link, link, rank, self._limits, self._device, host)
        return await asyncio.get_running_loop().run_in_executor(self._threads, choose)

    async def _keep(self, coming: Coroutine[Any, Any, StageLink]) -> StageLink:
        """Wait for a link and keep it, so that ``close`` ends it even if the other link fails."""
        link = await coming
        self._links.append(link)
        return link
