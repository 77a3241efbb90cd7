"""Tells an autoscaler by HTTP what it should know; a webhook that fails is logged, and nothing waits for it."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.request
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0


class Webhook:
    """Posts JSON objects to an address, one after the other; what comes while one is under way is left out.

    Args:
        url: Of the autoscaler.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._posting: asyncio.Task[None] | None = None

    def post(self, body: Mapping[str, Any]) -> None:
        """Begin to post; call it on an event loop."""
        if self._posting is None or self._posting.done():
            self._posting = asyncio.create_task(asyncio.to_thread(self._post, dict(body)))

    async def close(self) -> None:
        """Wait for what is under way, at most its timeout."""
        if self._posting is not None:
            await self._posting

    def _post(self, body: Mapping[str, Any]) -> None:
        request = urllib.request.Request(self._url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                answer.read(2**16)
        except (OSError, ValueError) as error:
            logger.warning("the autoscaler at %s was not told: %s", self._url, error)
