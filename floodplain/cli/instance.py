"""``floodplain instance MODEL --join HOST:PORT``: one engine behind a front, which ``serve --instances`` is."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from floodplain.cli.options import add_dataclass_flags, add_verb, dataclass_from
from floodplain.cli.variables import NO_FLAGS, PREFIX
from floodplain.cluster.settings import STANDARD_INPUT, InstanceConfig, split_address
from floodplain.engine.config import EngineConfig

_VERB = "import sys; from floodplain.cli.main import main; sys.exit(main())"


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    about = (
        "Join a front (floodplain serve --instances) and compute what it is told, until SIGTERM. "
        "The model and its number format must be those of the other instances."
    )
    parser = add_verb(verbs, "instance", about)
    add_dataclass_flags(parser, InstanceConfig, "instance flags")
    add_dataclass_flags(parser, EngineConfig, "engine flags")


def run(args: argparse.Namespace) -> int:
    """Serve a front; returns when a signal has stopped the instance and its requests have ended."""
    config, instance_config = dataclass_from(args, EngineConfig), dataclass_from(args, InstanceConfig)
    host, port = split_address(instance_config.join, "--join")

    from floodplain.cluster.parent import read_token

    token = read_token(instance_config.instance_token_file)

    from floodplain.cluster.instance import Instance
    from floodplain.engine.async_engine import AsyncEngine

    engine = AsyncEngine.from_config(config)
    asyncio.run(Instance(engine, host, port, token, instance_config.drain_timeout).run())
    return 0


def instance_command(config: EngineConfig, *, is_quiet: bool) -> list[str]:
    """The command of a child of the front, without the address; its token comes by standard input."""
    command = [sys.executable, "-c", _VERB, "instance", "--instance-token-file", STANDARD_INPUT]
    for item in fields(EngineConfig):
        value = getattr(config, item.name)
        flag = item.name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None and not item.metadata.get("positional"):
            command.append(f"--{flag}={value}")
    return [*command, *(["--quiet"] if is_quiet else []), config.model]


def environment_of_instances(environ: Mapping[str, str], num_threads: int) -> dict[str, str]:
    """The environment of the front's children: flags come by their command alone, and the cores are shared."""
    kept = {name: value for name, value in environ.items() if not name.upper().startswith(PREFIX) or name in NO_FLAGS}
    return {"OMP_NUM_THREADS": str(num_threads), **kept}
