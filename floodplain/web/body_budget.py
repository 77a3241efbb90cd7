"""Bounds on the bytes of bodies that a service holds: of one request, and of all running ones."""

from __future__ import annotations

from starlette.types import Message, Receive

from floodplain.web.errors import ApiError

BODIES_AT_ONCE = 64
"""Bodies of the largest size that may be held at once; thousands of usual bodies together are smaller."""


class BodyBudget:
    """The bytes of bodies that may be held.

    Args:
        max_body_bytes: Most bytes of one body.
        max_held_bytes: Most bytes of all running requests; None: ``BODIES_AT_ONCE`` of the largest bodies.
    """

    def __init__(self, max_body_bytes: int, max_held_bytes: int | None = None) -> None:
        self.max_body_bytes = max_body_bytes
        self.num_held_bytes = 0
        self._max_held_bytes = max_held_bytes or BODIES_AT_ONCE * max_body_bytes

    def check_length(self, declared: bytes) -> None:
        """Refuse a body by its ``Content-Length``.

        Raises:
            ApiError: 413.
        """
        if declared.isdigit() and int(declared) > self.max_body_bytes:
            raise self._too_large()

    def hold(self, num_bytes: int, num_of_body: int) -> None:
        """Count received bytes; ``num_of_body`` is the total of their body so far.

        Raises:
            ApiError: 413 or 503; the bytes are counted even so.
        """
        self.num_held_bytes += num_bytes
        if num_of_body > self.max_body_bytes:
            raise self._too_large()
        if self.num_held_bytes > self._max_held_bytes:
            message = (
                f"the bodies of requests that run fill the {self._max_held_bytes} bytes there are: try again later"
            )
            raise ApiError(503, message, code="bodies_too_large")

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is over {self.max_body_bytes} bytes: send less", code="body_too_large")


class HeldBody:
    """Receives the body of one request and counts it in ``budget`` until ``release``."""

    def __init__(self, receive: Receive, budget: BodyBudget) -> None:
        self._receive = receive
        self._budget = budget
        self._num_bytes = 0

    async def receive(self) -> Message:
        """The next message of the request.

        Raises:
            ApiError: As ``BodyBudget.hold``.
        """
        message = await self._receive()
        num_bytes = len(message.get("body", b""))
        self._num_bytes += num_bytes
        self._budget.hold(num_bytes, self._num_bytes)
        return message

    def release(self) -> None:
        """Return the body's bytes to the budget: the request has ended."""
        self._budget.num_held_bytes -= self._num_bytes
