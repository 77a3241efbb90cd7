"""Posts notices to an autoscaler by HTTP. A failure is logged, and nothing waits for a post."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from floodplain.core.errors import UserError
from floodplain.web.client import AnswerLimits, HttpClient, NoAnswer

logger = logging.getLogger(__name__)

LIMITS = AnswerLimits(total_s=5.0, max_bytes=2**16)


class Webhook:
    """Posts JSON objects to an autoscaler, one at a time; those posted while one is under way are dropped."""

    def __init__(self, url: str) -> None:
        self._client = HttpClient(url, name="the webhook")
        self._posting: asyncio.Task[None] | None = None

    def post(self, body: Mapping[str, Any]) -> None:
        """Start to post. Call it on an event loop."""
        if self._posting is None or self._posting.done():
            self._posting = asyncio.create_task(self._post(dict(body)))

    async def close(self) -> None:
        """Wait for the post under way, at most its timeout."""
        if self._posting is not None:
            await self._posting

    async def _post(self, body: Mapping[str, Any]) -> None:
        try:
            answer = await self._client.ask("", body, LIMITS)
        except (NoAnswer, UserError) as error:
            logger.warning("the autoscaler was not told: %s", error)
            return
        if answer.status >= 400:
            logger.warning("the autoscaler at %s answers HTTP %d: %s", self._client.url, answer.status, answer.reason())
