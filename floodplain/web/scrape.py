"""Answers to Prometheus: any ``Accept`` header has one, and the numbers are collected off the event loop."""

from __future__ import annotations

from fastapi import Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from floodplain.web.workers import Workers

OPEN_METRICS = "application/openmetrics-text"

SCRAPERS = Workers(1, "metrics")
"""Collects and writes metrics, one scrape after the other: collectors remember what they have reported."""


async def scrape(registry: CollectorRegistry, accept: str) -> Response:
    """The metrics of ``registry``, as OpenMetrics if the scraper takes that, else as Prometheus' text.

    Versions and escapings that a header names are not looked at: our names are the same in all of them.

    Args:
        registry: Its collectors are called in a worker's thread.
        accept: The scraper's header, which may hold anything.
    """
    kinds = {part.partition(";")[0].strip().lower() for part in accept.split(",")}
    encode, content_type = choose_encoder(OPEN_METRICS if OPEN_METRICS in kinds else "")
    return Response(await SCRAPERS.run(encode, registry), headers={"Content-Type": content_type})
