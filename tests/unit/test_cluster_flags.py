"""Flags of clusters: ``--cluster`` with and without Ray, and routers that migrate requests."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from floodplain.cli.serve import open_processes, part_flags
from floodplain.cluster.engine_flags import MOVABLE, config_of
from floodplain.cluster.launch.processes import LocalProcesses
from floodplain.cluster.launch.ray_processes import RayProcesses, check_ray
from floodplain.cluster.settings import ClusterConfig, InstanceConfig, RaySetup
from floodplain.core.errors import UserError
from floodplain.engine.config import EngineConfig

MIGRATE = {"relief": "migrate"}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"instances": 0}, "--instances must be between 1 and 256, not 0"),
        ({"instance_timeout": 2.0}, "--instance-timeout needs --instances"),
        ({"instance_token_file": Path("f")}, "--instance-token-file needs --instances"),
        ({"instances": 2, "instance_timeout": 0.1}, "--instance-timeout must be between 0.5 and 300 seconds"),
        ({"instances": 2, "instance_address": "nowhere"}, "--instance-address must be HOST:PORT, not 'nowhere'"),
        ({"instances": 2, "instance_address": "0.0.0.0:7"}, "lets other machines in: give --instance-token-file"),
        ({"cluster": "auto"}, "--cluster auto needs --instances: without it there is one engine"),
        ({"instance_cpus": 2}, "--instance-cpus 2 needs --instances"),
        ({"most_stages": 3}, "--most-stages 3 needs --instances"),
        ({"autoscale_webhook": "http://a"}, "--autoscale-webhook http://a needs --instances"),
        ({"instances": 2, "instance_cpus": 2}, "--instance-cpus 2 needs --cluster: it is what Ray reserves"),
        ({"instances": 2, "cluster": "auto", "instance_cpus": 0}, "--instance-cpus must be between 1 and 1024, not 0"),
        ({"instances": 2, "cluster": "head"}, "--cluster must be HOST:PORT, not 'head'"),
        ({"instances": 2, "cluster": "ray://head:1"}, "--cluster must be auto or HOST:PORT of the cluster's head"),
        ({"instances": 2, "cluster": "auto", "pipeline": True}, "--pipeline does not go with --cluster"),
        (
            {"instances": 2, "cluster": "head:1", "instance_address": "0.0.0.0:7"},
            "--instance-address 0.0.0.0:7 does not say where --cluster's machines reach this one",
        ),
        (MIGRATE, "--relief migrate needs --instances"),
        ({**MIGRATE, "instances": 1}, "needs --instances 2 or more: a request moves to another one"),
        ({**MIGRATE, "instances": 2, "pipeline": True}, "--pipeline: a request's KV is on all stages"),
        ({**MIGRATE, "instances": 2, "backstop": Path("x")}, "--backstop x needs --relief manual, drop or auto"),
    ],
)
def test_cluster_flags_that_contradict_are_one_line(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        ClusterConfig(**wrong)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_cluster_router_admits_other_machines_without_a_token_file() -> None:
    """Its instances have their own tokens; without ``--cluster`` a token file is needed."""
    ClusterConfig(instances=2, cluster="head:1", instance_address="192.0.2.1:7")
    with pytest.raises(UserError, match="give --instance-token-file"):
        ClusterConfig(instances=2, instance_address="192.0.2.1:7")


def set_version(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def find(name: str) -> str:
        assert name == "ray"
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)


def test_a_missing_or_old_ray_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    set_version(monkeypatch, None)
    with pytest.raises(UserError, match=r"^--cluster needs Ray, which is not installed: pip install .*cluster.*$"):
        check_ray()
    set_version(monkeypatch, "2.51.2")
    with pytest.raises(UserError, match=r"^--cluster needs Ray 2.52, .* not 2.51.2$"):
        check_ray()
    for version in ("2.52.0", "2.60.0rc1", "3.0.0"):
        set_version(monkeypatch, version)
        check_ray()


@pytest.mark.parametrize(("device", "num_gpus"), [("cpu", 0), ("cuda", 1)])
def test_ray_reserves_what_an_instance_takes(monkeypatch: pytest.MonkeyPatch, device: str, num_gpus: int) -> None:
    """Ray makes one GPU visible to an instance, so each uses the first."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    set_version(monkeypatch, "2.60.0")
    seen: dict[str, Any] = {}
    monkeypatch.setattr(RayProcesses, "__init__", lambda self, *what: seen.update(what=what))
    cluster_config = ClusterConfig(instances=3, cluster="head:1", instance_cpus=4, instance_address="192.0.2.1:0")
    engine = EngineConfig(model="m", device=device)
    assert isinstance(open_processes(engine, cluster_config, 3, is_quiet=True), RayProcesses)
    commands, environment, setup = seen["what"]
    assert setup == RaySetup(cluster="head:1", host="192.0.2.1", num_slots=3, num_cpus=4, num_gpus=num_gpus)
    assert environment["OMP_NUM_THREADS"] == "4"
    wanted = "--device=cuda:0" if num_gpus else "--device=cpu"
    assert len(commands) == 3 and all(wanted in command for command in commands)
    local = open_processes(engine, ClusterConfig(instances=3), 3, is_quiet=True)
    assert isinstance(local, LocalProcesses) and local.num_slots == 3


# -- flags of routers that migrate requests ----------------------------------------------------------------------------


def test_each_instance_of_a_migrating_router_is_movable_and_stays_packed() -> None:
    assert part_flags(ClusterConfig(instances=2, relief="migrate"), 2) == [["--movable"]] * 2
    assert part_flags(ClusterConfig(instances=2), 2) == [[], []]
    config = EngineConfig(model="dummy:tiny")
    assert config_of(config, MOVABLE) == config and config.pack_weights


@pytest.mark.parametrize("flags", [{"lend": "1MiB", "coordinator": "http://h:1"}, {"kv_expansion": "2"}])
def test_blocks_that_move_are_neither_lent_nor_streamed(flags: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="does not go with --relief migrate"):
        config_of(EngineConfig(model="dummy:tiny", **flags), MOVABLE)


@pytest.mark.parametrize(("other", "value"), [("droppable", True), ("stage", "0/2")])
def test_an_instance_is_movable_or_something_else(other: str, value: object) -> None:
    with pytest.raises(UserError, match=f"--movable does not go with --{other}"):
        InstanceConfig(join="h:1", instance_token_file="-", movable=True, **{other: value})  # type: ignore[arg-type]
