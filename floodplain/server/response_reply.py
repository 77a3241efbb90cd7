"""The answers of ``/v1/responses``: one object, or an event for each step towards it.

Source: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from floodplain.engine.outputs import OutputDelta
from floodplain.server.replies import ApiReply
from floodplain.server.response_requests import ResponseRequest
from floodplain.server.responses import Usage
from floodplain.server.streams import Tally
from floodplain.server.tool_parsers import Arguments, Begin, Text
from floodplain.server.turns import Turn, new_call_id

Event = tuple[str, dict[str, Any]]
"""A kind without its prefix ``response.``, and the fields beside it."""


class ResponseReply(ApiReply):
    """Writes the answer to one body, whose ``turn`` finds calls of tools."""

    def __init__(self, body: ResponseRequest, name: str, turn: Turn) -> None:
        self.request_id = f"resp_{name}"
        self._body, self._turn = body, turn
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._num_events = 0
        self._is_open = False
        self._reason = "stop"

    def event(self, index: int, delta: OutputDelta, tally: Tally) -> bytes:
        """The events of one delta; before the first one, those of the beginning."""
        events: list[Event] = []
        if self._num_events == 0:
            response = self._response("in_progress", None)
            events += [("created", {"response": response}), ("in_progress", {"response": response})]
        events += self._add(delta)
        return b"".join(self._write(kind, fields) for kind, fields in events)

    def closing(self, usage: Usage) -> bytes:
        """The end of the last item, and the whole response."""
        events = [*self._close_item(), (self._status(), {"response": self._response(self._status(), usage)})]
        return b"".join(self._write(kind, fields) for kind, fields in events)

    def failure(self, body: Mapping[str, Any]) -> bytes:
        """One event of the kind ``error``."""
        error = body["error"]
        fields = {"code": error["code"], "message": error["message"], "param": error["param"]}
        return self._write("error", fields, prefix="")

    def whole(self, outputs: Sequence[OutputDelta], usage: Usage) -> bytes:
        """The response as JSON."""
        for _ in (*self._add(outputs[0]), *self._close_item()):
            pass
        return json.dumps(self._response(self._status(), usage)).encode()

    # -- items ---------------------------------------------------------------------------------------------------------

    def _add(self, delta: OutputDelta) -> Iterator[Event]:
        """Add a delta to the items; the events of that."""
        self._reason = delta.finish_reason or self._reason
        for piece in self._turn.pieces(delta.text, is_last=delta.finish_reason is not None):
            if isinstance(piece, Begin):
                yield from self._open_item(_call(piece.name))
            elif isinstance(piece, Text) and not (self._is_open and self._items[-1]["type"] == "message"):
                yield from self._open_item(_message())
            if isinstance(piece, Text):
                self._items[-1]["content"][0]["text"] += piece.text
                yield "output_text.delta", {**self._place(), "delta": piece.text, "logprobs": []}
            elif isinstance(piece, Arguments):
                self._items[-1]["arguments"] += piece.text
                yield "function_call_arguments.delta", {**self._place(), "delta": piece.text}

    def _open_item(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._close_item()
        self._items.append(item)
        self._is_open = True
        is_message = item["type"] == "message"
        shown = {**item, "content": []} if is_message else dict(item)
        yield "output_item.added", {"output_index": len(self._items) - 1, "item": shown}
        if is_message:
            yield "content_part.added", {**self._place(), "part": dict(item["content"][0])}

    def _close_item(self) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        item["status"] = "incomplete" if self._reason == "length" else "completed"
        if item["type"] == "message":
            (part,) = item["content"]
            yield "output_text.done", {**self._place(), "text": part["text"], "logprobs": []}
            yield "content_part.done", {**self._place(), "part": part}
        else:
            done = {**self._place(), "name": item["name"], "arguments": item["arguments"]}
            yield "function_call_arguments.done", done
        yield "output_item.done", {"output_index": len(self._items) - 1, "item": item}

    def _place(self) -> dict[str, Any]:
        item = self._items[-1]
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        return place | ({"content_index": 0} if item["type"] == "message" else {})

    # -- the response --------------------------------------------------------------------------------------------------

    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        body = self._body.model_dump(by_alias=True)
        return {
            "id": self.request_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body["instructions"],
            "max_output_tokens": body["max_output_tokens"],
            "metadata": {},
            "model": body["model"],
            "output": list(self._items),
            "parallel_tool_calls": body["parallel_tool_calls"] is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": body["temperature"],
            "text": body["text"] or {"format": {"type": "text"}},
            "tool_choice": body["tool_choice"] or "auto",
            "tools": [{"strict": None, **tool} for tool in body["tools"] or ()],
            "top_p": body["top_p"],
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }

    def _write(self, kind: str, fields: Mapping[str, Any], prefix: str = "response.") -> bytes:
        event = {"type": f"{prefix}{kind}", "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {prefix}{kind}\ndata: {json.dumps(event)}\n\n".encode()


def _message() -> dict[str, Any]:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    ident = f"msg_{new_call_id()}"
    return {"id": ident, "type": "message", "role": "assistant", "status": "in_progress", "content": [part]}


def _call(name: str) -> dict[str, Any]:
    ident = new_call_id()
    fields = {"call_id": ident, "name": name, "arguments": "", "status": "in_progress"}
    return {"id": f"fc_{ident}", "type": "function_call", **fields}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }
