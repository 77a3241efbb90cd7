"""The flags of several instances behind one endpoint. Light to import, because the command line is built from it."""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import get_args

from floodplain.core.errors import UserError, flag_name
from floodplain.core.flags import changed, check_between, check_choices, flag
from floodplain.policy.microbatch import Split
from floodplain.web.address import check_address, is_loopback

LOCAL = "auto"
"""Value of ``--cluster``: a Ray on this machine only, which starts and ends with the router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySetup:
    """What a driver places: an actor for each slot, with ``num_cpus`` CPUs and ``num_gpus`` GPUs.

    ``cluster`` is ``HOST:PORT`` of a Ray cluster's head, or ``LOCAL``; ``host`` is where the router listens.
    """

    cluster: str
    host: str
    num_slots: int
    num_cpus: int
    num_gpus: int


MAX_INSTANCES = 256
MAX_CPUS = 1024
WILDCARDS = ("0.0.0.0", "::")
STANDARD_INPUT = "-"
LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 0.5, 300
BEATS_PER_TIMEOUT = 5
MAX_UNADMITTED = 32
"""Most connections to the router without a token; one more closes the oldest of them."""
FILES_PER_INSTANCE = 6
"""Open files of the router per instance: a connection and two pipes, doubled while it is being restarted."""


SPLITS = get_args(Split)
RELIEFS = ("none", "manual", "drop", "auto", "migrate")
DROPPING_RELIEFS = ("manual", "drop", "auto")
MOST_STAGES = 4


def count_router_files(num_instances: int | None) -> int:
    """Open files that instances cost their router; None: there are no instances, and it is no router."""
    return 0 if num_instances is None else MAX_UNADMITTED + FILES_PER_INSTANCE * num_instances


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The router's own flags. Raises ``UserError``, which names the flag, for a wrong value."""

    instances: int | None = flag(
        None, "serve from so many processes behind this endpoint, each an engine with the engine flags"
    )
    instance_address: str = flag("127.0.0.1:0", "where instances dial in; port 0 takes a free one", metavar="HOST:PORT")
    instance_token_file: Path | None = flag(
        None, "the token of instances that are started elsewhere, in a file of mode 0600"
    )
    instance_timeout: float = flag(1.0, "seconds of silence after which an instance is taken for dead", metavar="S")
    stall_timeout: float | None = flag(
        None,
        "seconds for which an instance may beat and compute nothing although it has work; then its requests go on"
        " elsewhere, and it is started again (default: ten times the longest step that any instance has ended, "
        "more for a larger step; at least 10, of its first step 20, and 60 while no instance has ended a step)",
        metavar="S",
    )
    cluster: str | None = flag(
        None,
        "have Ray place the instances and start them again: auto starts a Ray of this machine, HOST:PORT joins "
        "that of a cluster's head",
        metavar="auto|HOST:PORT",
    )
    instance_cpus: int | None = flag(
        None,
        "CPUs that Ray reserves for an instance, and its threads (default: this machine's, shared out)",
        metavar="N",
    )

    pipeline: bool = flag(
        False,
        "let the instances be the stages of one pipeline: each holds some layers, and has their KV and that of "
        "what it does not hold as its pool",
    )
    microbatches: str = flag(
        "even", "how a pipeline divides work: into parts of equal cost, by halving it, or by tokens", choices=SPLITS
    )
    step_profile: Path | None = flag(
        None,
        "what a pipeline's work costs, from floodplain profile step (default: by the model's shape)",
        metavar="FILE",
    )

    relief: str = flag(
        "none",
        "what instances do about an overload beside taking turns: none; manual: they can drop layers, and "
        "floodplain cluster tells them to; drop: they do when KV memory is short; auto: only if that pays (for "
        "these, matrices are not packed on CPUs); migrate: running requests move with their KV to an instance "
        "that has room",
        choices=RELIEFS,
    )
    most_stages: int = flag(
        MOST_STAGES, "instances that share one copy of the layers, at most, with --relief drop or auto"
    )
    autoscale_webhook: str | None = flag(
        None,
        "address that is posted to when memory is short and no more layers can be dropped, with --relief drop or auto",
        metavar="URL",
    )
    backstop: Path | None = flag(
        None,
        "folder for the copy of the layers from which dropped ones are restored if no instance has them (default:"
        " in the user's cache)",
        metavar="FOLDER",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        if self.instances is None:
            self._check_unused()
            return
        if self.pipeline and self.instances == 1:
            raise UserError("--pipeline needs --instances 2 or more: each instance is one of its stages")
        for name, value in changed(self).items():
            if name in ("microbatches", "step_profile") and not self.pipeline:
                raise UserError(f"{flag_name(name)} {value} needs --pipeline: nothing else has microbatches")
        self._check_relief()
        check_between(self, "instances", 1, MAX_INSTANCES)
        self._check_cluster()
        check_between(self, "stall_timeout", 1, 86400, "seconds")
        host, _ = split_address(self.instance_address, "--instance-address")
        if not is_loopback(host) and self.instance_token_file is None and self.cluster is None:
            raise UserError(
                f"--instance-address {self.instance_address} lets other machines in: give --instance-token-file FILE"
            )
        check_between(self, "instance_timeout", LEAST_TIMEOUT_S, MOST_TIMEOUT_S, "seconds")

    def _check_relief(self) -> None:
        check_between(self, "most_stages", 2, MOST_STAGES)
        if self.autoscale_webhook is not None:
            if self.relief not in ("drop", "auto"):
                raise UserError("--autoscale-webhook needs --relief drop or auto: nothing else watches the load")
            check_address("--autoscale-webhook", self.autoscale_webhook)
        drops = self.relief in DROPPING_RELIEFS
        if self.backstop is not None and not drops:
            raise UserError(
                f"--backstop {self.backstop} needs --relief manual, drop or auto: nothing else drops layers"
            )
        if self.relief != "none" and self.pipeline:
            why = "its stages have no layers to spare" if drops else "a request's KV is on all stages"
            raise UserError(f"--relief {self.relief} does not go with --pipeline: {why}")
        if self.relief != "none" and self.instances == 1:
            why = "one instance has to keep all layers" if drops else "a request moves to another one"
            raise UserError(f"--relief {self.relief} needs --instances 2 or more: {why}")

    def _check_cluster(self) -> None:
        if self.cluster is None:
            if self.instance_cpus is not None:
                raise UserError(f"--instance-cpus {self.instance_cpus} needs --cluster: it is what Ray reserves")
            return
        if self.cluster != LOCAL and "/" in self.cluster:
            raise UserError(f"--cluster must be {LOCAL} or HOST:PORT of the cluster's head, not {self.cluster!r}")
        if self.cluster != LOCAL:
            split_address(self.cluster, "--cluster")
        if self.pipeline:
            raise UserError("--pipeline does not go with --cluster: stages reach each other on one machine only")
        check_between(self, "instance_cpus", 1, MAX_CPUS)
        if split_address(self.instance_address, "--instance-address")[0] in WILDCARDS:
            raise UserError(
                f"--instance-address {self.instance_address} does not say where --cluster's machines reach this one: "
                "give the address that they do"
            )

    def _check_unused(self) -> None:
        for name, value in changed(self).items():
            shown = "" if name in _NOT_SHOWN else f" {value}"
            why = "without it there is one engine, in this process"
            raise UserError(f"{flag_name(name)}{shown} needs --instances: {why}")


_NOT_SHOWN = ("instance_address", "instance_token_file", "instance_timeout", "stall_timeout", "pipeline")
"""Flags whose values are left out of a refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceConfig:
    """The flags of one instance. Raises ``UserError``, which names the flag, for a wrong value."""

    join: str = flag(MISSING, "where the router listens: its --instance-address", metavar="HOST:PORT")
    instance_token_file: str = flag(
        MISSING,
        "the router's token, in a file of mode 0600; -: the first line of standard input, whose end ends the instance",
        metavar="FILE",
    )
    stage: str | None = flag(
        None,
        "of the router's own instances: which stage of its pipeline this is, from 0, of how many",
        metavar="STAGE/STAGES",
    )
    microbatches: str = flag("even", "of the router's own instances: how the first stage divides work", choices=SPLITS)
    step_profile: Path | None = flag(
        None, "of the router's own instances: what the first stage takes work to cost", metavar="FILE"
    )
    droppable: bool = flag(False, "let the router have this instance drop layers, as its --relief says")
    movable: bool = flag(False, "let the router move this instance's requests, as its --relief migrate says")
    backstop: Path | None = flag(None, "folder for the copy of the layers of a --droppable instance", metavar="FOLDER")
    drain_timeout: float = flag(30.0, "seconds that running requests get when the instance stops", metavar="S")

    def __post_init__(self) -> None:
        split_address(self.join, "--join")
        if self.stage is not None:
            split_stage(self.stage)
        if self.stage is not None and self.droppable:
            raise UserError("--droppable does not go with --stage: a stage has no layers to spare")
        if self.movable and (self.stage is not None or self.droppable):
            other = "--droppable" if self.droppable else "--stage"
            raise UserError(f"--movable does not go with {other}: requests move between whole instances")
        if self.backstop is not None and not self.droppable:
            raise UserError(f"--backstop {self.backstop} needs --droppable: nothing else drops layers")
        check_between(self, "drain_timeout", 0, 86400, "seconds")


def split_address(text: str, flag: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; an IPv6 host is in brackets. Raises ``UserError`` if it is no address."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        host.encode("idna")  # as the system's resolver will be asked
    except UnicodeError:
        host = ""
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) >= 2**16:
        raise UserError(f"{flag} must be HOST:PORT, not {text!r}")
    return host, int(port)


def split_stage(text: str) -> tuple[int, int]:
    """(number of the stage, number of stages) of ``STAGE/STAGES``. Raises ``UserError`` if it is none."""
    parts = text.split("/")
    if len(parts) == 2 and all(part.isascii() and part.isdigit() and len(part) < 5 for part in parts):
        stage, num_stages = int(parts[0]), int(parts[1])
        if stage < num_stages and 2 <= num_stages <= MAX_INSTANCES:
            return stage, num_stages
    raise UserError(f"--stage must be STAGE/STAGES, as 0/2, not {text!r}")
