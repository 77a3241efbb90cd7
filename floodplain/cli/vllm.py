"""``floodplain vllm serve MODEL``: vLLM's server with our scheduler and swap space."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from floodplain.cli.masking import mask_command
from floodplain.cli.options import add_dataclass_flags, add_verb, dataclass_from
from floodplain.core.errors import UserError
from floodplain.observe.terminal import say
from floodplain.plugins.vllm.register import CONNECTOR, CONNECTOR_MODULE, SCHEDULER
from floodplain.plugins.vllm.settings import DEFAULT_SWAP_BYTES, read_settings
from floodplain.plugins.vllm.versions import find_distribution
from floodplain.policy.goals import GAP_TOKENS
from floodplain.policy.registry import DEFAULT_POLICY, POLICIES

OWN_FLAGS = ("--scheduler-cls", "--kv-transfer-config", "--model")
"""Flags of vLLM set here; also ``--additional-config`` (swap none or vllm), ``--kv-offloading-size`` (swap vllm)."""

SWAPS = ("host", "peer", "vllm", "none")
"""Where KV of preempted requests goes: our swap space, a neighbour's memory as a tier before it, vLLM's own
offloading, or nowhere: it is recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig:
    """The flags of the verb."""

    model: str = field(metadata={"positional": True, "help": "as vLLM wants it: a name of the hub, or a folder"})
    policy: str = field(default=DEFAULT_POLICY, metadata={"choices": POLICIES, "help": "who runs next"})
    slice: int | None = field(default=None, metadata={"help": "steps of a slice (default: the policy's own)"})
    pace: float | None = field(
        default=None,
        metadata={
            "help": "paced, timely: tokens per second of a stream (default: a fifth of those of a stream that is alone)"
        },
    )
    max_gap: float | None = field(
        default=None,
        metadata={
            "help": f"paced, timely: longest silence, in seconds (default: as {GAP_TOKENS} tokens take at the pace)"
        },
    )
    ttft_goal: float | None = field(
        default=None,
        metadata={"help": "paced, timely: seconds to a first token (default: five times what it takes without load)"},
    )
    line_patience: float | None = field(
        default=None,
        metadata={"help": "timely: most times that a late request waits as long as under fcfs (default: 1.1)"},
    )
    swap: str | None = field(
        default=None,
        metadata={
            "choices": SWAPS,
            "help": "where KV goes that must leave the device; vllm: its own offloading; none: it is computed again "
            "(default: peer with --coordinator, else host)",
        },
    )
    swap_memory: int | None = field(
        default=None,
        metadata={
            "size": True,
            "help": "host memory for swap space, of each worker; with --swap vllm, of all (default: 4GiB)",
        },
    )
    coordinator: str | None = field(
        default=None, metadata={"help": "borrow memory on neighbours: address of the coordinator of leases"}
    )
    coordinator_token_file: str | None = field(
        default=None, metadata={"help": "this engine's token for the coordinator, in a file of mode 0600"}
    )
    device_name: str | None = field(default=None, metadata={"help": "by which the coordinator knows this engine"})
    peer_memory: int | None = field(
        default=None, metadata={"size": True, "help": "most memory that is borrowed (default: as --swap-memory)"}
    )


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    servers = verbs.add_parser("vllm", allow_abbrev=False).add_subparsers(metavar="serve")
    about = (
        "Run vLLM's server with our scheduler and our swap space in it. What follows -- goes to vLLM: -- --port 8000"
    )
    parser = add_verb(servers, "serve", about)
    add_dataclass_flags(parser, VllmConfig)
    parser.rest, parser.rest_owner = "vllm_flags", "vLLM"


def run(args: argparse.Namespace) -> int:
    """Print the command with its secrets masked, then replace this process by it.

    Raises UserError if a flag is out of its range or set here, or no vLLM is installed.
    """
    config = dataclass_from(args, VllmConfig)
    command = build_command(config, args.vllm_flags, find_server(find_distribution()[0]))
    say(shlex.join(mask_command(command, os.environ)))
    os.execv(command[0], command)


def find_server(distribution: str) -> list[str]:
    """The first words of the command of vLLM's server, before the model.

    ``vllm serve`` looks for a distribution named vllm, and fails if vLLM is installed under another name.
    """
    script = Path(sys.executable).with_name("vllm")
    if distribution == "vllm" and os.access(script, os.X_OK):
        return [str(script), "serve"]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]


def build_command(config: VllmConfig, flags: Sequence[str], server: Sequence[str]) -> list[str]:
    """The server's command line, with ``flags`` of vLLM after ``find_server``'s words.

    Raises UserError if a flag is out of its range, or set here already.
    """
    own = _own_flags(config)
    for flag in flags:
        name = flag.partition("=")[0]  # the value may be a secret
        if name.startswith("--") and _is_own(name.replace("_", "-").partition(".")[0], {*OWN_FLAGS, *own[::2]}):
            raise UserError(f"{name} is set by floodplain: leave it out")
    return [*server, config.model, "--scheduler-cls", SCHEDULER, *own, *flags]


def _own_flags(config: VllmConfig) -> list[str]:
    """Flags of vLLM with our settings and the place of KV: alternating names and values."""
    swap = config.swap or ("host" if config.coordinator is None else "peer")
    _check_swap(config, swap)
    extra = {one.name: getattr(config, one.name) for one in fields(config) if one.name not in ("model", "swap")}
    extra = {name: value for name, value in extra.items() if value is not None}
    num_bytes = extra.setdefault("swap_memory", DEFAULT_SWAP_BYTES)
    read_settings(extra, are_flags=True)
    if swap in ("none", "vllm"):
        del extra["swap_memory"]
        native = ["--kv-offloading-size", f"{num_bytes / 2**30:g}"] if swap == "vllm" else []
        return ["--additional-config", json.dumps({"floodplain": extra}), *native]
    transfer = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return ["--kv-transfer-config", json.dumps(transfer)]


def _check_swap(config: VllmConfig, swap: str) -> None:
    if swap == "peer" and config.coordinator is None:
        raise UserError("--swap peer borrows memory: pass --coordinator, which knows who lends")
    if swap != "peer" and config.coordinator is not None:
        raise UserError(f"--coordinator says who lends memory, and --swap {swap} borrows none: leave one of them out")
    if swap == "none" and config.swap_memory is not None:
        raise UserError("--swap-memory says how to swap, and --swap none does not: leave one of them out")


def _is_own(name: str, own: Iterable[str]) -> bool:
    """Whether vLLM would read ``name`` as a flag that is set here; it also accepts abbreviations."""
    return len(name) > len("--") and any(flag.startswith(name) for flag in own)
