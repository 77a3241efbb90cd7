"""Answers to Prometheus scrapes, for any ``Accept`` header; metrics are collected off the event loop."""

from __future__ import annotations

import re

from fastapi import Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from floodplain.web.workers import Workers

OPEN_METRICS, TEXT = "application/openmetrics-text", "text/plain"
_QUALITY = re.compile(r"0(\.\d{0,3})?|1(\.0{0,3})?", re.ASCII)

SCRAPERS = Workers(1, "metrics")
"""Collects and writes metrics, one scrape at a time: collectors remember what they have reported."""


async def scrape(registry: CollectorRegistry, request: Request) -> Response:
    """The metrics of ``registry``, collected on a worker's thread, in OpenMetrics or text as the scraper prefers."""
    accept = ",".join(request.headers.getlist("accept"))
    encode, content_type = choose_encoder(OPEN_METRICS if prefers_open_metrics(accept) else "")
    return Response(await SCRAPERS.run(encode, registry), headers={"Content-Type": content_type})


def prefers_open_metrics(accept: str) -> bool:
    """Whether an ``Accept`` header prefers OpenMetrics to text, or names it at equal qualities (RFC 9110, 12.5.1)."""
    ranges: dict[str, float] = {}
    for part in accept.split(","):
        kind, *parameters = part.split(";")
        name = kind.strip().lower()
        ranges[name] = max(ranges.get(name, 0.0), _quality(parameters))
    open_metrics, text = _quality_of(OPEN_METRICS, ranges), _quality_of(TEXT, ranges)
    return open_metrics > text or (OPEN_METRICS in ranges and open_metrics == text > 0)


def _quality(parameters: list[str]) -> float:
    """The ``q`` parameter; 1 if there is none, 0 (which excludes) if it is malformed."""
    for name, _, value in (parameter.partition("=") for parameter in parameters):
        if name.strip().lower() == "q":
            return float(value) if _QUALITY.fullmatch(value.strip()) else 0.0
    return 1.0


def _quality_of(name: str, ranges: dict[str, float]) -> float:
    """The quality of the most specific range that covers a media type; 0 if none does."""
    covering = (name, f"{name.partition('/')[0]}/*", "*/*")
    return next((ranges[one] for one in covering if one in ranges), 0.0)
