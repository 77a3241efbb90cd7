"""Versions of vLLM that lack what is used are refused; methods that the plug-in overrides have their tested form."""

from __future__ import annotations

import ast
import importlib
import tomllib
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from floodplain.core.errors import UserError
from floodplain.plugins.vllm import compat, compat_blocks, connector_parts, register, scheduler, surface, versions
from floodplain.plugins.vllm.connector_parts import FloodplainConnector
from floodplain.plugins.vllm.turn_queue import TurnQueue

pytestmark = pytest.mark.quick


def test_the_version_here_has_every_name_that_is_used(caplog: pytest.LogCaptureFixture) -> None:
    versions.expect_usable(versions.find_distribution()[1])
    assert not caplog.messages
    assert surface.find_changes() == []


def test_an_untested_version_with_every_name_runs_after_one_line(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        versions.expect_usable("0.99.1+cpu")
    [line] = caplog.messages
    assert "vLLM 0.99.1+cpu was not tested" in line and "\n" not in line


@dataclass
class Later:
    """A scheduler of a later vLLM."""

    running: list[str]

    def __init__(self) -> None:
        self.queue: list[str] = []

    def schedule(self, throttle: bool = False, fast: bool = False) -> None: ...

    def free(self, request: str, when: float) -> None: ...


@pytest.mark.parametrize(
    ("used", "change"),
    [
        ({"attributes": "running queue schedule"}, None),
        ({"attributes": "running waiting"}, "Later.waiting is gone"),
        ({"called": {"schedule": "throttle"}}, None),
        ({"called": {"plan": ""}}, "Later.plan is gone"),
        ({"called": {"free": "request"}}, "Later.free takes ('request', 'when'), and took ('request',)"),
        ({"called": {"free": "when request"}}, "Later.free takes ('request', 'when'), and took ('when', 'request')"),
        ({"forwarded": {"free": "request"}}, None),
        ({"forwarded": {"free": "when"}}, "Later.free takes ('request', 'when'), and took ('when',)"),
        ({"overridden": {"schedule": "throttle fast"}}, None),
        ({"overridden": {"schedule": "throttle"}}, "Later.schedule takes ('throttle', 'fast'), and took ('throttle',)"),
    ],
)
def test_a_change_is_named(used: dict[str, Any], change: str | None) -> None:
    found = surface.find_changes([surface.Used(__name__, "Later", **used)])
    assert found == ([] if change is None else [change])


def test_a_changed_version_is_refused_in_a_line_that_names_the_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = [f"Scheduler.a{number} is gone" for number in range(6)]
    monkeypatch.setattr(surface, "find_changes", lambda: gone)
    with pytest.raises(UserError) as refused:
        versions.expect_usable("0.99.1")
    assert str(refused.value) == (
        "vLLM 0.99.1 has changed what floodplain relies on (Scheduler.a0 is gone; Scheduler.a1 is gone;"
        " Scheduler.a2 is gone; Scheduler.a3 is gone and 2 more): pip install 'vllm==0.33.*'"
    )


@pytest.mark.parametrize(
    ("limit", "is_on_cpu", "splits", "is_refused"),
    [(40, True, True, True), (40, False, False, True), (40, False, True, False), (0, True, False, False)],
)
def test_a_limit_of_prompts_is_refused_where_some_are_not_split(
    limit: int, is_on_cpu: bool, splits: bool, is_refused: bool
) -> None:
    config = SimpleNamespace(long_prefill_token_threshold=limit, enable_chunked_prefill=splits)
    made: Any = SimpleNamespace(scheduler_config=config, _is_on_cpu=is_on_cpu)
    with (
        pytest.raises(UserError, match="--long-prefill-token-threshold: leave it out") if is_refused else nullcontext()
    ):
        compat.SteeredScheduler._expect_whole_prompts(made)


def test_swap_space_must_hold_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector_parts, "check_config", lambda config: None)
    monkeypatch.setattr(connector_parts, "find_groups", lambda config: ())
    cache = SimpleNamespace(num_blocks=10, kv_cache_tensors=[SimpleNamespace(size=1000)])
    found = []
    for num_bytes in (0, 99, 100):
        extra = {"kv_connector_extra_config": {"swap_memory": num_bytes}}
        config = SimpleNamespace(kv_transfer_config=SimpleNamespace(**extra))
        found.append(connector_parts._find_problem(config, cache))
    line = "swap_memory is less than one KV block of 100 bytes: raise it, or leave FloodplainConnector out"
    assert found == [line, line, None]


def test_the_surface_has_every_name_that_the_plug_in_uses() -> None:
    """All of the scheduler's own, all of a request's, and every name that is imported."""
    uses = _Uses()
    for path in Path(compat.__file__).parent.glob("*.py"):
        if path.name != "surface.py":
            uses.visit(ast.parse(path.read_text()))
    of_vllm = {(one.place, one.name) for one in surface.SURFACE}
    assert {(place, name) for place, name in uses.imported if place.startswith("vllm.v1")} <= of_vllm
    ours = {*dir(scheduler.FloodplainScheduler), *uses.set} - {*dir(Scheduler), *_names_of("Scheduler")}
    assert uses.own - ours <= _names_of("Scheduler") | _names_of("AsyncScheduler"), "of the scheduler"
    assert uses.of_request <= _names_of("Request")
    assert len(uses.own) > 50 and len(uses.of_request) > 10


class _Uses(ast.NodeVisitor):
    """Names that the plug-in's scheduler reads of itself, that are read of requests, and that are imported."""

    def __init__(self) -> None:
        self.own: set[str] = set()
        self.set: set[str] = set()
        self.of_request: set[str] = set()
        self.imported: set[tuple[str, str]] = set()
        self._is_scheduler = False

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.imported |= {(node.module or "", one.name) for one in node.names}

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._is_scheduler = node.name in ("StreamedInputScheduler", "SteeredScheduler", "FloodplainScheduler")
        self.generic_visit(node)
        self._is_scheduler = False

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = ast.unparse(node.value)
        if self._is_scheduler and owner in ("self", "super()") and node.attr != "__init__":
            is_new = isinstance(node.ctx, ast.Store) and node.attr not in _names_of("Scheduler")
            (self.set if is_new else self.own).add(node.attr)
        elif owner.split(".")[-1] == "request":
            self.of_request.add(node.attr)
        self.generic_visit(node)


def _names_of(name: str) -> set[str]:
    found = [one for one in surface.SURFACE if one.name == name]
    return {word for one in found for word in (*one.called, *one.overridden, *one.forwarded, *one.attributes.split())}


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
