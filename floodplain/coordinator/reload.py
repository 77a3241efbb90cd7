"""Reads the placement anew while the coordinator serves, as SIGHUP asks for."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from floodplain.coordinator.placement import read_pairs
from floodplain.coordinator.service import LeaseService
from floodplain.core.errors import UserError

logger = logging.getLogger(__name__)


class PlacementFile:
    """Reads a placement anew for a service. Used on one event loop.

    Args:
        path: The file.
        service: Gets the pairs. It keeps those that it has if the file cannot be read.
    """

    def __init__(self, path: Path, service: LeaseService) -> None:
        self._path, self._service = path, service
        self._reading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def reload_soon(self) -> None:
        """Read it, off the event loop; one reading after the other, so that the last one counts."""
        task = asyncio.get_running_loop().create_task(self._reload())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload(self) -> None:
        async with self._reading:
            try:
                pairs = await asyncio.to_thread(read_pairs, self._path)
            except UserError as error:
                logger.warning("%s: the placement stays as it was", error)
                return
            self._service.may_borrow_from = pairs
            logger.info("the placement %s counts from now on: %d consumers may borrow", self._path, len(pairs))
