"""Flags of routers that migrate requests: flags of their instances, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from floodplain.cli.serve import part_flags
from floodplain.cluster.engine_flags import config_of_movable
from floodplain.cluster.settings import ClusterConfig, InstanceConfig
from floodplain.core.errors import UserError
from floodplain.engine.config import EngineConfig


def test_each_instance_of_a_migrating_router_is_movable_and_stays_packed() -> None:
    assert part_flags(ClusterConfig(instances=2, relief="migrate"), 2) == [["--movable"]] * 2
    assert part_flags(ClusterConfig(instances=2), 2) == [[], []]
    config = EngineConfig(model="dummy:tiny")
    assert config_of_movable(config) == config and config.pack_weights


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"instances": 1}, "needs --instances 2 or more: a request moves to another one"),
        ({"instances": 2, "pipeline": True}, "--pipeline: a request's KV is on all stages"),
        ({"instances": 2, "backstop": Path("x")}, "--backstop x needs --relief manual, drop or auto"),
        ({}, "--relief migrate needs --instances"),
    ],
)
def test_what_does_not_go_with_migration_is_one_line(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        ClusterConfig(relief="migrate", **flags)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("flags", [{"lend": "1MiB", "coordinator": "http://h:1"}, {"kv_expansion": "2"}])
def test_blocks_that_move_are_neither_lent_nor_streamed(flags: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="does not go with --relief migrate"):
        config_of_movable(EngineConfig(model="dummy:tiny", **flags))


@pytest.mark.parametrize(("other", "value"), [("droppable", True), ("stage", "0/2")])
def test_an_instance_is_movable_or_something_else(other: str, value: object) -> None:
    with pytest.raises(UserError, match=f"--movable does not go with --{other}"):
        InstanceConfig(join="h:1", instance_token_file="-", movable=True, **{other: value})  # type: ignore[arg-type]
