"""The form in which prompts are sent to a server: token ids or text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from floodplain.core.errors import UserError
from floodplain.workload.records import LoadRequest

logger = logging.getLogger(__name__)

WAYS = ("auto", "tokens", "text")
SEND_HELP = (
    "prompts as token ids, whose lengths are exact, or as text, whose lengths follow the server's usage; auto: as "
    "token ids, and as text if the server refuses them"
)
_REFUSALS = frozenset({400, 415, 422, 500, 501})
"""Statuses of servers that do not support prompts of token ids."""


class PromptForm:
    """The form of prompts for one server, one of ``WAYS``, else UserError; ``decode`` makes a text of token ids."""

    def __init__(self, way: str = "auto", decode: Callable[[Sequence[int]], str] | None = None) -> None:
        if way not in WAYS:
            raise UserError(f"--send must be one of {', '.join(WAYS)}, not {way!r}")
        self._decode = decode
        self._is_settled = way != "auto"
        self._sends_text = way == "text"

    def of(self, request: LoadRequest) -> Iterator[list[int] | str]:
        """The prompt as the server accepts it; before that is known, ids, then text. Raises UserError without one."""
        if request.prompt_token_ids and not self._sends_text:
            yield list(request.prompt_token_ids)
            if self._is_settled and not self._sends_text:
                return
        if request.prompt is not None:
            yield request.prompt
        elif self._decode is not None:
            yield self._decode(request.prompt_token_ids)
        elif self._sends_text:
            raise UserError(f"{request.request_id} has no text to send")

    def note(self, prompt: list[int] | str, status: int, server: str) -> bool:
        """Note the server's HTTP status for a prompt as it was sent. True if it may accept another form of it."""
        if status == 200 and not self._is_settled:
            self._is_settled, self._sends_text = True, isinstance(prompt, str)
            if self._sends_text:
                logger.warning("%s takes no token ids: prompts are sent as text, lengths follow its usage", server)
        return status in _REFUSALS and not isinstance(prompt, str)
