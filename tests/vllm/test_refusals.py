"""Untested versions of vLLM are refused; the methods of vLLM that the plug-in overrides have their tested form."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

from floodplain.core.errors import UserError
from floodplain.plugins.vllm import compat, compat_blocks, register, versions
from floodplain.plugins.vllm.turn_queue import TurnQueue
from floodplain.plugins.vllm.wires import FloodplainConnector

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.32.0"])
def test_untested_versions_are_refused_unless_allowed(version: str) -> None:
    with pytest.raises(UserError, match=f'vLLM {version} was not tested .* "allow_untested": true'):
        versions.expect_tested(version, allow_untested=False)
    versions.expect_tested(version, allow_untested=True)


def test_the_version_here_was_tried() -> None:
    versions.expect_tested(versions.find_distribution()[1], allow_untested=False)
    versions.expect_tested("0.32.0+cpu", allow_untested=False)


def test_every_method_that_vllm_calls_has_its_signature() -> None:
    """A hook that vLLM calls differently, or no longer, would have no effect."""
    import inspect

    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.core.sched.scheduler import Scheduler

    ours = compat.SteeredScheduler
    for name in (
        "schedule",
        "_preempt_request",
        "_reserve_prefill_lookahead",
        "_inflight_prefill_reserved_blocks",
        "reset_prefix_cache",
    ):
        parameters = [list(inspect.signature(getattr(cls, name)).parameters) for cls in (Scheduler, ours)]
        assert parameters[0] == parameters[1], name
    source = inspect.getsource(Scheduler.schedule)
    lookahead, encoder = "self._reserve_prefill_lookahead(", "self._try_schedule_encoder_inputs("
    assert source.count(lookahead) == source.count(encoder) == 2, "of those that run and those that come"
    assert source.index(encoder) < source.index(lookahead), "what is encoded is what is computed"
    assert "self._preempt_request(" in source
    assert set(RequestQueue.__abstractmethods__) <= set(dir(TurnQueue))


def test_the_block_pool_reports_all_its_changes() -> None:
    """Changes by other methods of vLLM's pool would leave counts stale."""
    import inspect

    from vllm.v1.core import block_pool

    theirs, ours = block_pool.BlockPool, compat_blocks.WatchedPool
    hooks = [name for name in vars(ours) if callable(getattr(theirs, name, None)) and not name.startswith("__")]
    assert {"touch", "free_blocks", "unpin_blocks", "_insert_block_hash", "_remove_cached_block_hashes"} <= set(hooks)
    changing = [name for name, method in vars(theirs).items() if ".ref_cnt " in _source_of(method, "+=", "-=")]
    assert set(changing) <= {*hooks, "get_new_blocks"}, "blocks that it gives had no holder"
    caching = [
        name for name, method in vars(theirs).items() if "hash_to_block" in _source_of(method, "insert(", "pop(")
    ]
    assert set(caching) <= set(hooks)
    assert inspect.getsource(theirs).count("cached_block_hash_to_block = ") == 1, "reset_prefix_cache makes a new one"


def _source_of(method: object, *words: str) -> str:
    """The lines of a method that have one of these words."""
    import inspect

    lines = inspect.getsource(method).splitlines() if inspect.isfunction(method) else []
    return "\n".join(line for line in lines if any(word in line for word in words))


def test_the_entry_point_makes_the_connector_known_and_may_run_twice() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for _ in range(2):
        register.register()
    assert KVConnectorFactory.get_connector_class_by_name(register.CONNECTOR) is FloodplainConnector


def test_it_is_the_one_that_is_installed() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    [path] = project["entry-points"]["vllm.general_plugins"].values()
    module, _, name = path.partition(":")
    assert getattr(importlib.import_module(module), name) is register.register
