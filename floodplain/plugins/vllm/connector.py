"""What ``kv_connector_module_path`` names: here vLLM asks for the connector, in each of its processes.

vLLM asks for the class while it makes its configuration, in the user's own process and before any other is started,
but hands over no configuration. So the one that is being made is looked up where it is made: what is refused there
costs one line, and not a start.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

from floodplain.plugins.vllm.refusal import refusals_in_one_line
from floodplain.plugins.vllm.register import CONNECTOR
from floodplain.plugins.vllm.settings import read_settings
from floodplain.plugins.vllm.support import expect_supported
from floodplain.plugins.vllm.versions import expect_tested, find_distribution

if TYPE_CHECKING:
    from floodplain.plugins.vllm.wires import FloodplainConnector as FloodplainConnector


def __getattr__(name: str) -> Any:
    """The connector's class, for a configuration that is supported.

    Raises:
        Refusal: The configuration that is being made is not.
        AttributeError: Something else was asked for.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    config = _config_in_the_making()
    if config is not None:
        with refusals_in_one_line():
            check_config(config)
    if name != CONNECTOR:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from floodplain.plugins.vllm.wires import FloodplainConnector

    return FloodplainConnector


def check_config(vllm_config: Any) -> None:
    """Refuse what the plug-in does not support, as far as it is known before a model is loaded.

    Raises:
        UserError: One line, with what to change.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    extra = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
    is_own = vllm_config.kv_transfer_config.kv_connector == CONNECTOR
    settings = read_settings(extra if is_own else {})
    expect_tested(find_distribution()[1], allow_untested=bool(extra.get("allow_untested")))
    follows_sleep = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
    expect_supported(vllm_config, borrows=settings.coordinator is not None, follows_sleep=follows_sleep)


def _config_in_the_making() -> Any:
    """The ``VllmConfig`` in whose ``__post_init__`` this is called; None elsewhere."""
    from vllm.config import VllmConfig

    for frame, _ in traceback.walk_stack(None):
        if frame.f_code.co_name == "__post_init__" and isinstance(frame.f_locals.get("self"), VllmConfig):
            return frame.f_locals["self"]
    return None
