"""``floodplain serve MODEL``: an OpenAI server over one engine or several instances."""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from floodplain.cli.instance import environment_of_instances, instance_command
from floodplain.cli.options import add_verb, dataclass_from
from floodplain.cluster.engine_flags import (
    DROPPABLE,
    MOVABLE,
    PIPELINE,
    config_of,
    config_of_instance,
    gpus_of_instance,
)
from floodplain.cluster.settings import DROPPING_RELIEFS, ClusterConfig, RaySetup, count_router_files, split_address
from floodplain.core.errors import UserError
from floodplain.core.request import Goals
from floodplain.engine.config import EngineConfig
from floodplain.files.extras import require
from floodplain.observe.start_log import StartLog
from floodplain.observe.terminal import announce
from floodplain.server.settings import ServerConfig

if TYPE_CHECKING:
    from floodplain.cluster.launch.launcher import Processes
    from floodplain.cluster.router.engine import ClusterEngine
    from floodplain.server.app import Extension
    from floodplain.server.protocol import ServingEngine
    from floodplain.server.tracing import RequestTracer

logger = logging.getLogger(__name__)


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    about = "Serve a model over the OpenAI API until SIGINT or SIGTERM; then drain and exit."
    instances = (ClusterConfig, "flags of many instances")
    add_verb(verbs, "serve", about, (ServerConfig, "server flags"), instances, (EngineConfig, "engine flags"))


def run(args: argparse.Namespace) -> int:
    """Serve; returns when a signal has stopped the server and running requests have ended."""
    start_log = StartLog(logging.INFO)
    config, server_config = dataclass_from(args, EngineConfig), dataclass_from(args, ServerConfig)
    cluster_config = dataclass_from(args, ClusterConfig)

    from floodplain.engine.config import check_early
    from floodplain.server.auth import KeyRing
    from floodplain.web.address import bind, url_of
    from floodplain.web.bearer import check_exposure
    from floodplain.web.limits import limit_connections

    if config.fair_by == "key" and server_config.api_key_file is None:
        raise UserError("--fair-by key needs --api-key-file: without keys all requests are one client's")
    key_file, shared = server_config.api_key_file, server_config.share_prefixes
    keys = KeyRing.from_file(key_file, share_prefixes=shared) if key_file else None
    check_exposure(server_config.host, keys, "--api-key-file")
    limits = limit_connections(
        server_config.max_connections,
        server_config.keep_alive_timeout,
        num_reserved=count_router_files(cluster_config.instances),
    )
    with closing(bind(server_config.host, server_config.port)) as sock:
        if cluster_config.cluster is None:  # else another machine has the model and the memory
            check_early(config)
        instances = None
        if (num_instances := cluster_config.instances) is not None:
            instances = Instances.prepare(config, cluster_config, num_instances, is_quiet=args.quiet)

        start_log.begin("importing PyTorch and the server")
        from floodplain.server.app import Server  # slow imports come after fast checks

        logger.info("server config %s", json.dumps(asdict(server_config), default=str))
        tracer = _open_tracer(server_config, config)
        engine, extend = _open_engine(config, instances, server_config, start_log)

        def say_ready() -> None:
            start_log.end()
            url, model = url_of(sock), (*server_config.served_model_name, engine.model_name)[0]
            is_json = args.format == "json"
            announce(json.dumps({"url": url, "model": model}) if is_json else f"{model} is served at {url}")

        server = Server(
            engine,
            keys=keys,
            on_ready=say_ready,
            limits=limits,
            config=server_config,
            goals=promised_goals(config),
            tracer=tracer,
            extend=extend,
        )
        server.serve_on(sock)
    return 0


def promised_goals(config: EngineConfig) -> Goals:
    """The goals that flags set for every request."""
    settings = config.sharing_settings()
    return Goals(ttft_s=settings.ttft_goal_s, tpot_s=settings.tpot_goal_s)


def _open_tracer(server_config: ServerConfig, config: EngineConfig) -> RequestTracer | None:
    if server_config.otlp_traces_endpoint is None:
        return None
    require("--otlp-traces-endpoint", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    model_name = (*server_config.served_model_name, config.model)[0]
    try:
        from floodplain.server.tracing import open_tracer

        return open_tracer(server_config.otlp_traces_endpoint, model_name)
    except ValueError as error:  # the SDK's, about its variables
        raise UserError(f"a variable of OpenTelemetry (OTEL_...) has a wrong value: {error}") from error


def _open_engine(
    config: EngineConfig, instances: Instances | None, server_config: ServerConfig, start_log: StartLog
) -> tuple[ServingEngine, Extension | None]:
    if instances is None:
        from floodplain.engine.async_engine import AsyncEngine

        alone = AsyncEngine.from_config(config, start_log)
        if server_config.otlp_traces_endpoint is not None:
            alone.engine.record_copies()
        return alone, None
    from floodplain.cluster.router.routes import extend_with

    start_log.begin(f"{instances.processes.num_slots} instances, whose log lines follow")
    engine = _open_cluster(instances)
    return engine, extend_with(engine)


def part_flags(cluster_config: ClusterConfig, num_instances: int) -> list[list[str]]:
    """The flags of each instance that make it a pipeline stage, or let it drop layers or migrate requests."""
    if not cluster_config.pipeline:
        backstop = cluster_config.backstop
        folder = [] if backstop is None else [f"--backstop={backstop.absolute()}"]
        flags = ["--droppable", *folder] if cluster_config.relief in DROPPING_RELIEFS else []
        flags = ["--movable"] if cluster_config.relief == "migrate" else flags
        return [flags for _ in range(num_instances)]
    shared = [f"--microbatches={cluster_config.microbatches}"]
    if cluster_config.step_profile is not None:
        from floodplain.cost.step_time import read_cost
        from floodplain.files.profile import read_profile

        read_cost(read_profile(cluster_config.step_profile, "step").result)  # or UserError
        shared.append(f"--step-profile={cluster_config.step_profile}")
    return [[f"--stage={index}/{num_instances}", *shared] for index in range(num_instances)]


def open_processes(
    config: EngineConfig, cluster_config: ClusterConfig, num_instances: int, *, is_quiet: bool
) -> Processes:
    """The processes of instances, not started: local or by Ray. Raises UserError if flags or Ray forbid it."""
    from floodplain.cluster.launch.processes import LocalProcesses
    from floodplain.files.cores import count_cores

    is_local = cluster_config.cluster is None  # Ray shows each instance only its own GPU, as the first
    configs = [config_of_instance(config, num_instances, index if is_local else 0) for index in range(num_instances)]
    parts = part_flags(cluster_config, num_instances)
    commands = [
        instance_command(one, is_quiet=is_quiet, part_flags=part) for one, part in zip(configs, parts, strict=True)
    ]
    num_cpus = cluster_config.instance_cpus or max(1, count_cores() // num_instances)
    environment = environment_of_instances(os.environ, num_cpus)
    if cluster_config.cluster is None:
        return LocalProcesses(commands, environment)
    from floodplain.cluster.launch.ray_processes import RayProcesses

    setup = RaySetup(
        cluster=cluster_config.cluster,
        host=split_address(cluster_config.instance_address, "--instance-address")[0],
        num_slots=num_instances,
        num_cpus=num_cpus,
        num_gpus=gpus_of_instance(config),
    )
    return RayProcesses(commands, environment, setup)


@dataclass(frozen=True, slots=True)
class Instances:
    """What a router needs of its flags; everything in them that is known before slow imports has been checked.

    ``config`` are the engine flags of instances, and ``token`` is that of instances that are started elsewhere.
    """

    config: EngineConfig
    cluster_config: ClusterConfig
    processes: Processes
    token: str | None

    @classmethod
    def prepare(
        cls, config: EngineConfig, cluster_config: ClusterConfig, num_instances: int, *, is_quiet: bool
    ) -> Instances:
        """Check the flags, and read the files that they name; nothing is started. Raises ``UserError``."""
        from floodplain.cluster.launch.parent import read_token

        if cluster_config.pipeline:
            config = config_of(config, PIPELINE)
        if cluster_config.relief in DROPPING_RELIEFS:
            config = config_of(config, DROPPABLE)
        elif cluster_config.relief == "migrate":
            config = config_of(config, MOVABLE)
        processes = open_processes(config, cluster_config, num_instances, is_quiet=is_quiet)
        token_file = cluster_config.instance_token_file
        token = None if token_file is None else read_token(str(token_file))
        return cls(config, cluster_config, processes, token)


def _open_cluster(instances: Instances) -> ClusterEngine:
    from floodplain.cluster.router.engine import ClusterEngine
    from floodplain.web.address import bind

    cluster_config = instances.cluster_config
    if cluster_config.pipeline:
        logger.info("a pipeline serves by arrival (--policy fcfs), without swap space")
    with ExitStack() as on_failure:
        sock: socket.socket = bind(*split_address(cluster_config.instance_address, "--instance-address"))
        on_failure.callback(sock.close)
        engine = ClusterEngine(instances.config, cluster_config, sock, instances.processes, instances.token)
        on_failure.pop_all()
    return engine
