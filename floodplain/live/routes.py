"""The routes of a live page: its static files, which need no secret, and its data, which do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse

from floodplain.live.feed import Feed
from floodplain.web import events
from floodplain.web.connection import ABORT_SCOPE_KEY
from floodplain.web.gate import HEAD_SCOPE_KEY, PAGE_FOLDER

KINDS: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Media types of the page's files, by suffix."""
HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""Headers of the page's files: nothing is loaded from elsewhere, and no other page may frame this one."""


@cache
def page_files() -> Mapping[str, bytes]:
    """The contents of the page's files by name, as they are in the package."""
    folder = files("floodplain.live") / "page"
    return {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()}


def page_routes(feed: Feed, check: Callable[[Request], None]) -> APIRouter:
    """Routes of the page and of ``GET /live``. ``check`` raises ApiError if a request may not see the data.

    They are not in the API's schema: the page and ``floodplain top`` are their clients, and the stream has no end.
    """
    routes = APIRouter(include_in_schema=False)
    contents = page_files()

    @routes.get("/")
    async def show_page() -> Response:
        return _file("index.html", contents["index.html"])

    for name, content in contents.items():
        routes.add_api_route(f"{PAGE_FOLDER}{name}", _serving(name, content), methods=["GET"])

    @routes.get("/live")
    async def live(request: Request) -> Response:
        check(request)
        if HEAD_SCOPE_KEY in request.scope:  # the stream has no end
            return Response(headers=events.HEADERS, media_type="text/event-stream")
        updates = feed.listen(request.scope[ABORT_SCOPE_KEY])
        return StreamingResponse(updates, headers=events.HEADERS, media_type="text/event-stream")

    return routes


def _serving(name: str, content: bytes) -> Callable[[], Awaitable[Response]]:
    async def serve() -> Response:
        return _file(name, content)

    return serve


def _file(name: str, content: bytes) -> Response:
    suffix = name[name.rindex(".") :]
    return Response(content, headers=dict(HEADERS), media_type=KINDS[suffix])
