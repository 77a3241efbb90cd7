"""The choice of how activations reach the next stage: from device to device by NCCL, or through host memory.

Both ends of a link send their facts, and compute the same choice from them. No flag: NCCL is used whenever possible.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from floodplain.cluster.pipeline.device_link import DeviceLink, Link, PairGroup
from floodplain.cluster.wire.frames import Frame
from floodplain.cluster.wire.plan_codec import PlanLimits
from floodplain.cluster.wire.stage_link import StageLink
from floodplain.core.codec import WireError, from_json
from floodplain.core.errors import PeerLost

logger = logging.getLogger(__name__)

FIND_TIMEOUT = timedelta(seconds=10)
"""Longest time for the two processes of a group to find each other."""
GLOO_TIMEOUT = timedelta(seconds=10)
NCCL_TIMEOUT = timedelta(days=1)
"""The router detects a silent stage and ends the link; with a shorter value torch's watchdog would end this process."""
SENDER, RECEIVER = 0, 1


@dataclass(frozen=True, slots=True)
class EndFacts:
    """The facts of one end of a link.

    Attributes:
        device: The GPU's UUID; empty on a CPU.
        has_nccl: Whether its torch has NCCL.
    """

    device: str
    has_nccl: bool


Choose = Callable[[EndFacts, EndFacts], str | None]


def describe_end(device: torch.device) -> EndFacts:
    """The facts of an end on this device."""
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return EndFacts(uuid, dist.is_available() and dist.is_nccl_available())


def choose_backend(one: EndFacts, other: EndFacts) -> str | None:
    """The torch.distributed backend that carries activations; None: they pass through host memory.

    NCCL needs two GPUs: it refuses two processes on the same one.
    """
    has_nccl = one.has_nccl and other.has_nccl
    return "nccl" if has_nccl and one.device and other.device and one.device != other.device else None


def introduce(link: StageLink, device: torch.device) -> None:
    """Send the facts of this end, as the first frame. Both ends do this before either calls ``choose_link``.

    Raises:
        PeerLost: The link has ended.
    """
    link.send(Frame(asdict(describe_end(device))))


def choose_link(
    link: StageLink, rank: int, limits: PlanLimits, device: torch.device, host: str, choose: Choose = choose_backend
) -> Link:
    """Agree with the other end on a link. Blocks until it has answered, or the link is closed.

    Args:
        link: Just opened, and ``introduce``d.
        rank: ``SENDER`` or ``RECEIVER`` of activations.
        limits: Bounds on the shape and dtype of activations.
        device: Of this stage.
        host: The address of the receiver at which the sender reaches it.
        choose: Chooses the backend.

    Raises:
        PeerLost: The link has ended, the other end breaks the protocol, or no process group can be made.
    """
    try:
        name = choose(describe_end(device), from_json(EndFacts, link.recv().body))
        if name is not None:
            group = _open_group(name, link, rank, host)
    except (RuntimeError, KeyError, TypeError, ValueError, OSError, WireError) as error:
        raise PeerLost(f"no process group with the neighbouring stage ({error!r})") from None
    direction = "to the next stage" if rank == SENDER else "from the stage before"
    logger.info("activations %s go %s", direction, "by way of the host" if name is None else f"by {name}")
    return link if name is None else DeviceLink(link, group, limits, device)


def _open_group(name: str, link: StageLink, rank: int, host: str) -> PairGroup:
    """A process group of the two ends, over its own store, which the receiver runs."""
    if rank == RECEIVER:
        with socket.create_server((host, 0), family=_family_of(host)) as listener:
            port = listener.getsockname()[1]
            store = _open_store(host, port, is_master=True, master_listen_fd=listener.detach())
        link.send(Frame({"port": port}))
    else:
        store = _open_store(host, int(link.recv().body["port"]), is_master=False)
    if name == "gloo":
        backend: Any = dist.ProcessGroupGloo(store, rank, 2, GLOO_TIMEOUT)
        return PairGroup(backend, 1 - rank, GLOO_TIMEOUT, store)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = NCCL_TIMEOUT
    return PairGroup(dist.ProcessGroupNCCL(store, rank, 2, options), 1 - rank, NCCL_TIMEOUT, store)


def _open_store(host: str, port: int, **flags: Any) -> Any:
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    return make(host, port, world_size=2, timeout=FIND_TIMEOUT, wait_for_workers=False, **flags)


def _family_of(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
