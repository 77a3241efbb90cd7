"""The entry point ``vllm.general_plugins``, which vLLM calls in each of its processes."""

from __future__ import annotations

from contextlib import suppress

CONNECTOR = "FloodplainConnector"
CONNECTOR_MODULE = "floodplain.plugins.vllm.connector"
SCHEDULER = "floodplain.plugins.vllm.scheduler.FloodplainScheduler"
MULTI = "MultiConnector"
"""vLLM's connector that has several others."""
NATIVE = "OffloadingConnector"
"""vLLM's own connector for swap space in the host's memory."""


def register() -> None:
    """Register the connector's name; Refusal if this process starts an unsupported engine. Safe to call twice.

    https://docs.vllm.ai/en/latest/design/plugin_system.html
    """
    from floodplain.plugins.vllm.connector import refuse_early

    register_name()
    refuse_early()


def register_name() -> None:
    """Register the connector's name: vLLM's MultiConnector looks statistics up by it. Safe to call twice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)
