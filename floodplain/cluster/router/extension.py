"""The additions to a server's application if several instances are behind it."""

from __future__ import annotations

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from floodplain.cluster.router.engine import ClusterEngine
from floodplain.cluster.router.group_routes import group_router
from floodplain.cluster.router.listing import listing_router
from floodplain.cluster.router.metrics import ClusterMetrics
from floodplain.cluster.router.migration_routes import migration_router
from floodplain.cluster.router.operators import OWN_NAMES
from floodplain.server.app import Extension
from floodplain.web.origin import LOOPBACK_ONLY, OwnNames


def extend_with(engine: ClusterEngine, names: OwnNames = LOOPBACK_ONLY) -> Extension:
    """Adds metrics of each instance, ``/instances``, and the routes of groups and migrations.

    Args:
        engine: The instances.
        names: Host names under which the server answers about them, beside those of the loopback.
    """

    def extend(app: FastAPI, registry: CollectorRegistry) -> None:
        setattr(app.state, OWN_NAMES, names)
        registry.register(ClusterMetrics(engine.model_name, engine.router))
        app.include_router(listing_router(engine.router))
        app.include_router(group_router(engine.router))
        app.include_router(migration_router(engine.router))

    return extend
