"""Answers to Prometheus scrapes; metrics are collected off the event loop."""

from __future__ import annotations

from fastapi import Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from floodplain.web.workers import Workers

OPEN_METRICS = "application/openmetrics-text"

SCRAPERS = Workers(1, "metrics")
"""Collects and writes metrics, one scrape at a time: collectors remember what they have reported."""


async def scrape(registry: CollectorRegistry, request: Request) -> Response:
    """The metrics of ``registry``, collected on a worker's thread: OpenMetrics if ``Accept`` names it, else text.

    Versions and escapings in ``Accept`` are ignored: the library fails on malformed ones, and names need none.
    """
    names_open_metrics = any(OPEN_METRICS in one.lower() for one in request.headers.getlist("accept"))
    encode, content_type = choose_encoder(OPEN_METRICS if names_open_metrics else "")
    return Response(await SCRAPERS.run(encode, registry), headers={"Content-Type": content_type})
