"""``floodplain serve MODEL``: an OpenAI server over one engine."""

from __future__ import annotations

import argparse
import json
import logging
from contextlib import closing
from dataclasses import asdict
from typing import Any

from floodplain.cli.options import add_dataclass_flags, add_verb, dataclass_from
from floodplain.core.errors import UserError
from floodplain.engine.config import EngineConfig
from floodplain.observe.terminal import announce
from floodplain.server.settings import ServerConfig

logger = logging.getLogger(__name__)


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    parser = add_verb(verbs, "serve", "Serve a model over the OpenAI API until SIGINT or SIGTERM; then drain and exit.")
    add_dataclass_flags(parser, ServerConfig, "server flags")
    add_dataclass_flags(parser, EngineConfig, "engine flags")


def run(args: argparse.Namespace) -> int:
    """Serve; returns when a signal has stopped the server and running requests have ended."""
    config, server_config = dataclass_from(args, EngineConfig), dataclass_from(args, ServerConfig)

    from floodplain.server.auth import KeyRing, check_exposure
    from floodplain.server.run import serve
    from floodplain.web.limits import limit_connections
    from floodplain.web.listen import bind, url_of

    if config.fair_by == "key" and server_config.api_key_file is None:
        raise UserError("--fair-by key needs --api-key-file: without keys all requests are one client's")
    key_file, shared = server_config.api_key_file, server_config.share_prefixes
    keys = KeyRing.from_file(key_file, share_prefixes=shared) if key_file else None
    check_exposure(server_config.host, keys)
    limits = limit_connections(server_config.max_connections)
    with closing(bind(server_config.host, server_config.port)) as sock:
        from floodplain.engine.async_engine import AsyncEngine

        logger.info("server config %s", json.dumps(asdict(server_config), default=str))
        engine = AsyncEngine.from_config(config)

        def say_ready() -> None:
            url, model = url_of(sock), engine.model_name
            is_json = args.format == "json"
            announce(json.dumps({"url": url, "model": model}) if is_json else f"{model} is served at {url}")

        drain_timeout_s = server_config.drain_timeout
        serve(engine, sock, keys=keys, drain_timeout_s=drain_timeout_s, on_ready=say_ready, limits=limits)
    return 0
