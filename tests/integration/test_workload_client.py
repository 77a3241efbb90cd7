from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from floodplain.core.errors import UserError
from floodplain.workload.client import run_load
from floodplain.workload.http_target import HttpTarget
from floodplain.workload.records import LoadRequest, RequestFailed, RequestRecord, TokenChunk
from tests.support.fake_server import Asked, Handler, serving, streaming
from tests.support.waiting import HANG_S


def request(index: int = 0, arrival_s: float = 0.0, **changes: Any) -> LoadRequest:
    values: dict[str, Any] = {"prompt": "hi", "prompt_token_ids": (5, 6), "max_tokens": 4}
    return LoadRequest(request_id=f"r{index}", arrival_s=arrival_s, **(values | changes))


def send_one(handler: Handler, sent: LoadRequest | None = None, **options: Any) -> RequestRecord:
    async def scenario() -> RequestRecord:
        async with serving(handler) as url:
            (record,) = await run_load(HttpTarget(url, "m", **options), [sent or request()], progress=False)
            return record

    return asyncio.run(scenario())


def event(text: str = "", finish_reason: str | None = None, **extra: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason, **extra}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def test_a_whole_stream_is_recorded() -> None:
    record = send_one(streaming(event("Hé"), event("llo"), event("!", "length"), usage(7, 3), DONE))
    assert (record.error, record.text, record.prompt_tokens) == (None, "Héllo!", 7)
    assert record.output_token_ids is None
    assert len(record.token_times_s) == 3
    assert 0 <= record.sent_s <= record.token_times_s[0] <= record.token_times_s[-1] <= record.finished_s


def test_the_body_is_what_openai_and_vllm_expect() -> None:
    seen: list[Any] = []

    async def handler(asked: Asked) -> None:
        seen.append((asked.json(), asked.headers.get("authorization")))
        await streaming(event("a", "stop"), usage(2, 1), DONE)(asked)

    send_one(handler, request(ignore_eos=True), api_key="k3y")
    send_one(handler, request(prompt="only text", prompt_token_ids=()))
    send_one(handler, token_ids=True)
    common = {"model": "m", "max_tokens": 4, "temperature": 0.0, "stream": True}
    common |= {"stream_options": {"include_usage": True}}
    assert seen == [
        ({**common, "prompt": [5, 6], "ignore_eos": True}, "Bearer k3y"),
        ({**common, "prompt": "only text"}, None),
        ({**common, "prompt": [5, 6], "return_token_ids": True}, None),
    ]


def test_several_tokens_in_a_chunk_are_counted_with_or_without_ids() -> None:
    counted = send_one(streaming(event("aaaa"), event(""), event("b", "stop"), usage(2, 6), DONE))
    assert len(counted.token_times_s) == 6
    assert counted.output_token_ids is None
    told = send_one(streaming(event("ab", token_ids=[1, 2, 3]), event("", "stop", token_ids=[4]), usage(2, 4), DONE))
    assert told.output_token_ids == (1, 2, 3, 4)
    assert told.token_times_s[0] == told.token_times_s[2] <= told.token_times_s[3]


async def test_without_a_server_each_request_fails_and_the_load_goes_on() -> None:
    async with serving(streaming()) as url:
        pass
    for record in await run_load(HttpTarget(url, "m"), [request(0), request(1)], progress=False):
        assert record.error is not None
        assert record.error.startswith("no server at http://127.0.0.1:")


def test_a_stuck_server_does_not_delay_later_requests() -> None:
    """The server answers once the last request has arrived: a closed loop would never end."""
    arrivals = [0.0, 0.02, 0.04, 0.06]

    async def scenario() -> list[RequestRecord]:
        all_here, num_here = asyncio.Event(), 0

        async def handler(asked: Asked) -> None:
            nonlocal num_here
            num_here += 1
            if num_here == len(arrivals):
                all_here.set()
            await all_here.wait()
            await streaming(event("a", "stop"), usage(2, 1), DONE)(asked)

        async with serving(handler) as url:
            requests = [request(i, when) for i, when in enumerate(arrivals)]
            return await run_load(HttpTarget(url, "m"), requests[::-1], progress=False)

    records = asyncio.run(scenario())
    assert [record.request_id for record in records] == ["r3", "r2", "r1", "r0"]
    assert all(record.error is None and record.sent_s >= record.arrival_s for record in records)
    assert records[-1].token_times_s[0] >= records[0].sent_s


async def test_cancelling_the_load_hangs_up_on_the_server() -> None:
    has_come, has_gone = asyncio.Event(), asyncio.Event()

    async def handler(asked: Asked) -> None:
        has_come.set()
        await asked.wait_gone()
        has_gone.set()

    async with serving(handler) as url:
        load = asyncio.create_task(run_load(HttpTarget(url, "m"), [request(0), request(1, 3600.0)], progress=False))
        await has_come.wait()
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        await asyncio.wait_for(has_gone.wait(), HANG_S)


class LocalTarget:
    """A target in this process that counts how many requests it answers at once."""

    def __init__(self, error: Exception | None = None) -> None:
        self.num_open = self.max_open = 0
        self._error = error

    async def send(self, request: LoadRequest) -> AsyncGenerator[TokenChunk, None]:
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            for token in range(3):
                yield TokenChunk(time.monotonic(), "t", (token,))
                await asyncio.sleep(0)
            if self._error is not None:
                raise self._error
        finally:
            self.num_open -= 1


def load(target: LocalTarget, num_requests: int, **options: Any) -> list[RequestRecord]:
    requests = [request(i) for i in range(num_requests)]
    return asyncio.run(run_load(target, requests, progress=False, **options))


def test_a_target_in_this_process_reports_its_tokens() -> None:
    target = LocalTarget()
    assert all(record.output_token_ids == (0, 1, 2) for record in load(target, 8))
    assert target.max_open == 8


def test_concurrency_is_capped_on_request() -> None:
    target = LocalTarget()
    load(target, 8, max_concurrency=2)
    assert target.max_open == 2
    with pytest.raises(UserError, match="max_concurrency"):
        load(target, 1, max_concurrency=0)


def test_failures_are_recorded_and_bugs_are_not_swallowed() -> None:
    for failure in (RequestFailed("no"), UserError("no")):
        (record,) = load(LocalTarget(failure), 1)
        assert (record.error, len(record.token_times_s)) == ("no", 3)
    with pytest.raises(ExceptionGroup):
        load(LocalTarget(ZeroDivisionError()), 2)


def test_a_progress_line_is_shown_only_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(run_load(LocalTarget(), [request()], progress=False))
    assert capsys.readouterr().err == ""
    asyncio.run(run_load(LocalTarget(), [request()]))
    assert "1/1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x", "http://", "", "http://[x", "http://h:99999", "http://h/?a=1", "http://u:p@h"]
)
def test_a_bad_address_is_named(url: str) -> None:
    with pytest.raises(UserError, match="base_url"):
        HttpTarget(url, "m")
