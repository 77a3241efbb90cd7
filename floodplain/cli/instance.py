"""``floodplain instance MODEL --join HOST:PORT``: one engine behind a router (``serve --instances``)."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from floodplain.cli.options import add_verb, dataclass_from
from floodplain.cli.sources import NO_FLAGS, PREFIX
from floodplain.cluster.engine_flags import DROPPABLE, MOVABLE, PIPELINE, config_of
from floodplain.cluster.settings import STANDARD_INPUT, InstanceConfig, split_address, split_stage
from floodplain.core.errors import flag_name
from floodplain.engine.config import EngineConfig

if TYPE_CHECKING:
    from floodplain.cluster.instance.instance import Member

_VERB = "import sys; from floodplain.cli.main import main; sys.exit(main())"


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    about = (
        "Join a router (floodplain serve --instances) and compute what it is told, until SIGTERM. "
        "The model and its number format must be those of the other instances."
    )
    add_verb(verbs, "instance", about, (InstanceConfig, "instance flags"), (EngineConfig, "engine flags"))


def run(args: argparse.Namespace) -> int:
    """Serve a router; returns when a signal has stopped the instance and its requests have ended."""
    config, instance_config = dataclass_from(args, EngineConfig), dataclass_from(args, InstanceConfig)
    host, port = split_address(instance_config.join, "--join")

    from floodplain.cluster.launch.parent import read_token

    token = read_token(instance_config.instance_token_file)

    from floodplain.cluster.instance.instance import Dialer

    member = _open_member(config, instance_config)
    asyncio.run(Dialer(member, host, port, token, instance_config.drain_timeout).run())
    return 0


def _open_member(config: EngineConfig, instance_config: InstanceConfig) -> Member:
    if instance_config.droppable:
        from floodplain.cluster.groups.droppable import open_droppable

        host, _ = split_address(instance_config.join, "--join")
        return open_droppable(config_of(config, DROPPABLE), instance_config.backstop, host)
    if instance_config.movable:
        from floodplain.cluster.migration.movable import open_movable

        return open_movable(config_of(config, MOVABLE), split_address(instance_config.join, "--join")[0])
    if instance_config.stage is None:
        from floodplain.cluster.instance.instance import Replica
        from floodplain.engine.async_engine import AsyncEngine

        return Replica(AsyncEngine.from_config(config))
    from floodplain.cluster.instance.stage_member import open_stage

    place, num_stages = split_stage(instance_config.stage)
    split, profile = instance_config.microbatches, instance_config.step_profile
    return open_stage(config_of(config, PIPELINE), place, num_stages, split, profile)


def instance_command(config: EngineConfig, *, is_quiet: bool, part_flags: Sequence[str] = ()) -> list[str]:
    """The command of a child of the router, without the address; its token comes on standard input."""
    command = [sys.executable, "-c", _VERB, "instance", "--instance-token-file", STANDARD_INPUT, *part_flags]
    for item in fields(EngineConfig):
        value, flag = getattr(config, item.name), flag_name(item.name)
        if isinstance(value, bool):
            command.append(flag if value else f"--no-{flag[2:]}")
        elif value is not None and not item.metadata.get("positional"):
            command.append(f"{flag}={value}")
    return [*command, *(["--quiet"] if is_quiet else []), config.model]


def environment_of_instances(environ: Mapping[str, str], num_threads: int) -> dict[str, str]:
    """The environment of the router's children: no flags, which are in the command, and a share of the cores."""
    kept = {name: value for name, value in environ.items() if not name.upper().startswith(PREFIX) or name in NO_FLAGS}
    return {"OMP_NUM_THREADS": str(num_threads), **kept}
