"""Records of requests that a load sent."""

from __future__ import annotations

from typing import Any

from floodplain.workload.records import RequestRecord


def make_record(*token_times_s: float, sent_s: float = 0.0, **changes: Any) -> RequestRecord:
    """A request that was sent at its arrival; its answer had tokens at these times, and ended with the last one."""
    values: dict[str, Any] = {"request_id": "r", "prompt_tokens": 1, "output_token_ids": None, "text": ""}
    times: dict[str, Any] = {"arrival_s": sent_s, "sent_s": sent_s, "finished_s": max(token_times_s, default=sent_s)}
    return RequestRecord(**(values | times | {"token_times_s": token_times_s} | changes))
