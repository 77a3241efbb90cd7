"""``floodplain vllm serve MODEL``: vLLM's server with our scheduler and swap space."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from floodplain.cli.options import add_verb, dataclass_from
from floodplain.core.errors import UserError
from floodplain.core.flags import flag
from floodplain.observe.terminal import say
from floodplain.plugins.vllm.register import CONNECTOR, CONNECTOR_MODULE, MULTI, SCHEDULER
from floodplain.plugins.vllm.settings import DEFAULT_SWAP_BYTES, read_settings
from floodplain.plugins.vllm.versions import find_distribution
from floodplain.policy.goals import GAP_TOKENS
from floodplain.policy.registry import DEFAULT_POLICY, POLICIES

OWN_FLAGS = ("--scheduler-cls", "--kv-transfer-config", "--model")
"""Flags of vLLM set here; also ``--additional-config`` (swap none or vllm), ``--kv-offloading-size`` (swap vllm)."""

NO_SETTINGS = ("model", "swap", "beside")
"""Flags of the verb that are no settings of the plug-in."""

SWAPS = ("host", "peer", "vllm", "none")
"""Where KV of preempted requests goes: our swap space, a neighbour's memory as a tier before it, vLLM's own
offloading, or nowhere: it is recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig:
    """The flags of the verb."""

    model: str = field(metadata={"positional": True, "help": "as vLLM wants it: a name of the hub, or a folder"})
    policy: str = flag(DEFAULT_POLICY, "who runs next", choices=POLICIES)
    slice: int | None = flag(None, "steps of a slice (default: the policy's own)")
    pace: float | None = flag(
        None, "paced, timely: tokens per second of a stream (default: a fifth of those of a stream that is alone)"
    )
    max_gap: float | None = flag(
        None, f"paced, timely: longest silence, in seconds (default: as {GAP_TOKENS} tokens take at the pace)"
    )
    ttft_goal: float | None = flag(
        None, "paced, timely: seconds to a first token (default: five times what it takes without load)"
    )
    line_patience: float | None = flag(
        None, "timely: most times that a late request waits as long as under fcfs (default: 1.1)"
    )
    swap: str | None = flag(
        None,
        "where KV goes that must leave the device; vllm: its own offloading; none: it is computed again "
        "(default: peer with --coordinator, else host)",
        choices=SWAPS,
    )
    swap_memory: int | None = flag(
        None, "host memory for swap space, of each worker; with --swap vllm, of all (default: 4GiB)", size=True
    )
    pin_sessions: bool = flag(
        False, "keep KV of ended requests in swap space for the next request of their session, while that is likely"
    )
    beside: str | None = flag(
        None, "another connector behind ours, as NixlConnector or LMCacheMPConnector, or its --kv-transfer-config"
    )
    coordinator: str | None = flag(None, "borrow memory on neighbours: address of the coordinator of leases")
    coordinator_token_file: str | None = flag(None, "this engine's token for the coordinator, in a file of mode 0600")
    device_name: str | None = flag(None, "by which the coordinator knows this engine")
    peer_memory: int | None = flag(None, "most memory that is borrowed (default: as --swap-memory)", size=True)


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    servers = verbs.add_parser("vllm", allow_abbrev=False).add_subparsers(metavar="serve")
    about = (
        "Run vLLM's server with our scheduler and our swap space in it. What follows -- goes to vLLM: -- --port 8000"
    )
    parser = add_verb(servers, "serve", about, VllmConfig)
    parser.rest, parser.rest_owner = "vllm_flags", "vLLM"


def run(args: argparse.Namespace) -> int:
    """Print the command, secrets masked, and become it. Raises UserError for wrong flags, or without vLLM."""
    config = dataclass_from(args, VllmConfig)
    command = build_command(config, args.vllm_flags, find_server(find_distribution()[0]))
    say(shlex.join(mask_command(command, os.environ)))
    os.environ["PYTHONSAFEPATH"] = "1"  # -P for processes that vLLM starts itself: it inspects models in one
    os.execv(command[0], command)


def find_server(distribution: str) -> list[str]:
    """The first words of the command of vLLM's server, before the model.

    ``vllm serve`` looks for a distribution named vllm, and fails if vLLM is installed under another name. Its
    substitute must not import modules from the current folder, either (``-P``).
    """
    script = Path(sys.executable).with_name("vllm")
    if distribution == "vllm" and os.access(script, os.X_OK):
        return [str(script), "serve"]
    return [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model"]


def build_command(config: VllmConfig, flags: Sequence[str], server: Sequence[str]) -> list[str]:
    """The server's command with ``flags`` of vLLM. Raises UserError if a flag is out of its range or set here."""
    own = _own_flags(config)
    for one in flags:
        name = one.partition("=")[0]  # the value may be a secret
        if name.startswith("--") and _is_own(name.replace("_", "-").partition(".")[0], {*OWN_FLAGS, *own[::2]}):
            raise UserError(f"{name} is set by floodplain: leave it out")
    return [*server, config.model, "--scheduler-cls", SCHEDULER, *own, *flags]


def _own_flags(config: VllmConfig) -> list[str]:
    """Flags of vLLM with our settings and the place of KV: alternating names and values."""
    swap = config.swap or ("host" if config.coordinator is None else "peer")
    _check_swap(config, swap)
    extra = {one.name: getattr(config, one.name) for one in fields(config) if one.name not in NO_SETTINGS}
    extra = {name: value for name, value in extra.items() if value is not None and value is not False}
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
    if config.beside is not None:
        both = {"connectors": [transfer, _read_other(config.beside)]}
        transfer = {"kv_connector": MULTI, "kv_role": "kv_both", "kv_connector_extra_config": both}
    return ["--kv-transfer-config", json.dumps(transfer)]


def _read_other(text: str) -> dict[str, Any]:
    """The setting of another connector, from its name or its JSON. Raises UserError if it is neither."""
    try:
        found = {"kv_connector": text} if text.isidentifier() else json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("kv_connector") in (None, CONNECTOR):
        raise UserError("--beside is another connector's name, or JSON of vLLM's --kv-transfer-config that names it")
    return {"kv_role": "kv_both"} | found


def _check_swap(config: VllmConfig, swap: str) -> None:
    if swap == "peer" and config.coordinator is None:
        raise UserError("--swap peer borrows memory: pass --coordinator, which knows who lends")
    if swap != "peer" and config.coordinator is not None:
        raise UserError(f"--coordinator says who lends memory, and --swap {swap} borrows none: leave one of them out")
    if config.pin_sessions and swap != "host":
        raise UserError(f"--pin-sessions keeps KV in this host's memory, and --swap is {swap}: leave one of them out")
    if config.beside is not None and swap in ("none", "vllm"):
        raise UserError(f"--beside names a connector behind ours, and --swap {swap} has none: leave one of them out")
    if swap == "none" and config.swap_memory is not None:
        raise UserError("--swap-memory says how to swap, and --swap none does not: leave one of them out")


def _is_own(name: str, own: Iterable[str]) -> bool:
    """Whether vLLM would read ``name`` as a flag that is set here; it also accepts abbreviations."""
    return len(name) > len("--") and any(flag.startswith(name) for flag in own)


MASK = "***"

_SECRET_NAMES = {
    "apikey", "key", "keys", "token", "password", "passwd", "passphrase", "secret", "secrets",
    "credential", "credentials", "auth", "authorization", "bearer",
}  # fmt: skip
"""Last words of names whose values are secrets. A file that holds one ends in another word."""

_SECRET_FLAGS = {"--watermark-config"}
"""Flags of vLLM that its own log masks too, and whose names do not look secret."""

_ABBREVIATED = ("--api-key", "--hf-token")
"""Flags that vLLM accepts abbreviated."""

_MIN_ENVIRONMENT_LENGTH = 6
"""Shorter values of variables are not searched for: they may equal an unrelated word of the command."""

_IN_TEXT = (
    (re.compile(r"(://)\S+(?=@)"), r"\1" + MASK),
    (re.compile(r"(?i)([?&][\w-]*(?:key|token|secret|password)=)[^&\s]+"), r"\1" + MASK),
    (re.compile(r"(?i)\b(bearer |basic )\S+"), r"\1" + MASK),
    (re.compile(r"\b(hf_|sk-)[\w-]{8,}"), r"\1" + MASK),
)
"""Patterns of secrets inside values: in URLs, in headers, and keys with known prefixes."""


def mask_command(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The words of a command with its secrets masked; also the values of secret variables, wherever they appear."""
    known = sorted(
        (v for k, v in environ.items() if _is_secret(k) and len(v) >= _MIN_ENVIRONMENT_LENGTH), key=len, reverse=True
    )
    shown, hides = [], False
    for word in words:
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            hides = _is_secret(name) and not equals
            is_hidden = equals and _is_secret(name)
            shown.append(name + equals + (MASK if is_hidden else _mask_value(value, known)))
        else:
            shown.append(MASK if hides else _mask_value(word, known))
    return shown


def _is_secret(name: str) -> bool:
    name = name.lower().replace("_", "-").rstrip("+")
    is_short = len(name) > len("--a") and any(flag.startswith(name) for flag in _ABBREVIATED)
    is_flag = name.startswith("--") and (is_short or name.partition(".")[0] in _SECRET_FLAGS)
    return is_flag or re.split(r"[-.\s]", name)[-1] in _SECRET_NAMES


def _mask_value(text: str, known: Sequence[str]) -> str:
    """One word with its secrets masked; in a JSON object, in each of its values."""
    if text.startswith(("{", "[")):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return _mask_text(text, known)
        masked = _mask_object(found, known)
        return text if masked == found else json.dumps(masked)
    return _mask_text(text, known)


def _mask_object(value: Any, known: Sequence[str]) -> Any:
    if isinstance(value, dict):
        return {key: MASK if _is_secret(key) else _mask_object(inner, known) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mask_object(inner, known) for inner in value]
    return _mask_text(value, known) if isinstance(value, str) else value


def _mask_text(text: str, known: Sequence[str]) -> str:
    for secret in known:
        text = text.replace(secret, MASK)
    for pattern, shown in _IN_TEXT:
        text = pattern.sub(shown, text)
    return text
