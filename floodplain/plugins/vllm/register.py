"""What vLLM calls in each of its processes where floodplain is installed (entry point ``vllm.general_plugins``)."""

from __future__ import annotations

from contextlib import suppress

CONNECTOR = "FloodplainConnector"
CONNECTOR_MODULE = "floodplain.plugins.vllm.connector"
SCHEDULER = "floodplain.plugins.vllm.scheduler.FloodplainScheduler"


def register() -> None:
    """Make the connector known by its name. Loads nothing of it, and changes nothing else; safe to call twice.

    https://docs.vllm.ai/en/latest/design/plugin_system.html
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)
