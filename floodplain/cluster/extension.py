"""What the application of a server has more if many instances are behind it."""

from __future__ import annotations

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from floodplain.cluster.engine import ClusterEngine
from floodplain.cluster.group_routes import group_router
from floodplain.cluster.listing import listing_router
from floodplain.cluster.metrics import ClusterMetrics
from floodplain.cluster.migration_routes import migration_router
from floodplain.server.app import Extension


def extend_with(engine: ClusterEngine) -> Extension:
    """Adds metrics of each instance, ``/instances``, and what is known of groups and migrations."""

    def extend(app: FastAPI, registry: CollectorRegistry) -> None:
        registry.register(ClusterMetrics(engine.model_name, engine.front))
        app.include_router(listing_router(engine.front))
        app.include_router(group_router(engine.front))
        app.include_router(migration_router(engine.front))

    return extend
