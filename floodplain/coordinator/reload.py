"""Reads the placement anew at SIGHUP, while the coordinator serves."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from floodplain.coordinator.placement import read_pairs
from floodplain.coordinator.service import LeaseService
from floodplain.core.errors import UserError

logger = logging.getLogger(__name__)


class PlacementFile:
    """Reads a placement file for a service, off the event loop. Used on one event loop.

    Args:
        path: The file.
        service: Gets the pairs. It keeps its present ones if the file cannot be read.
    """

    def __init__(self, path: Path, service: LeaseService) -> None:
        self._path, self._service = path, service
        self._is_wanted = False
        self._reading: asyncio.Task[None] | None = None

    def reload_soon(self) -> None:
        """Read the file in a thread. All calls during a read lead to one more read after it."""
        self._is_wanted = True
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self._reload())

    async def _reload(self) -> None:
        while self._is_wanted:
            self._is_wanted = False
            try:
                pairs = await asyncio.to_thread(read_pairs, self._path)
            except UserError as error:
                logger.warning("%s: the placement stays as it was", error)
                continue
            self._service.may_borrow_from = pairs
            logger.info("the placement %s counts from now on: %d consumers may borrow", self._path, len(pairs))
