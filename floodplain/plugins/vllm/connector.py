"""The module for ``kv_connector_module_path``: vLLM gets the connector's class here, in each of its processes.

vLLM gets the class while it makes its configuration, before any other process is started, but passes no configuration.
So that is looked up on the stack: a refusal at this point costs one line, and no start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from floodplain.plugins.vllm.compat_names import find_config, follows_sleep
from floodplain.plugins.vllm.refusal import end_quietly_after_refusals, refusals_in_one_line
from floodplain.plugins.vllm.register import CONNECTOR, register_name
from floodplain.plugins.vllm.settings import find_extra, read_alone, read_settings
from floodplain.plugins.vllm.support import expect_supported, names_connector, names_scheduler
from floodplain.plugins.vllm.versions import expect_usable, find_distribution

if TYPE_CHECKING:
    from floodplain.plugins.vllm.connector_parts import FloodplainConnector as FloodplainConnector


def __getattr__(name: str) -> Any:
    """Return the connector's class; Refusal if the configuration that is being made is not supported."""
    if name.startswith("__"):
        raise AttributeError(name)
    end_quietly_after_refusals()
    config = find_config()
    if config is not None:
        with refusals_in_one_line():
            check_config(config)
    if name != CONNECTOR:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from floodplain.plugins.vllm.connector_parts import FloodplainConnector

    register_name()
    return FloodplainConnector


def refuse_early() -> None:
    """Raise Refusal if the configuration on the caller's stack names our scheduler or connector, and is unsupported."""
    end_quietly_after_refusals()
    config = find_config()
    if config is not None and (names_scheduler(config) or names_connector(config)):
        with refusals_in_one_line():
            check_config(config)


def check_config(vllm_config: Any) -> None:
    """Raise UserError for what the plug-in does not support, as far as it is known before a model is loaded."""
    settings = (read_settings if names_connector(vllm_config) else read_alone)(find_extra(vllm_config))
    expect_usable(find_distribution()[1])
    borrows, pins = settings.coordinator is not None, settings.pin_sessions
    expect_supported(vllm_config, borrows=borrows, pins=pins, follows_sleep=follows_sleep())
