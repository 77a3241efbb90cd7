"""How activations go from one stage to the next: from device to device by NCCL, or by way of the host.

Both ends of a link say what they are; from that both come to the same choice. No flag: NCCL is used whenever it can be.
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

from floodplain.cluster.codec import from_json
from floodplain.cluster.device_link import DeviceLink, Link, PairGroup
from floodplain.cluster.plan_codec import PlanLimits
from floodplain.cluster.stage_frames import Frame
from floodplain.cluster.stage_link import StageLink
from floodplain.core.errors import PeerLost
from floodplain.lending.fields import WireError

logger = logging.getLogger(__name__)

FIND_TIMEOUT = timedelta(seconds=10)
"""For the two processes of a group to find each other."""
GLOO_TIMEOUT = timedelta(seconds=10)
NCCL_TIMEOUT = timedelta(days=1)
"""A silent stage is the front's to find, which ends the link; torch's own watchdog would end this process."""
SENDER, RECEIVER = 0, 1


@dataclass(frozen=True, slots=True)
class EndFacts:
    """What one end of a link says of itself.

    Attributes:
        device: The GPU's UUID; empty on a CPU.
        has_nccl: Whether its torch has NCCL.
    """

    device: str
    has_nccl: bool


Choose = Callable[[EndFacts, EndFacts], str | None]


def describe_end(device: torch.device) -> EndFacts:
    """The facts of a stage on this device."""
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return EndFacts(uuid, dist.is_available() and dist.is_nccl_available())


def choose_backend(one: EndFacts, other: EndFacts) -> str | None:
    """The backend of torch.distributed that carries activations; None: they go by way of the host.

    NCCL needs two GPUs: it refuses two processes on the same one.
    """
    has_nccl = one.has_nccl and other.has_nccl
    return "nccl" if has_nccl and one.device and other.device and one.device != other.device else None


def introduce(link: StageLink, device: torch.device) -> None:
    """Say what this end is, as the first frame. Both ends do this before either calls ``choose_link``.

    Raises:
        PeerLost: The link has ended.
    """
    link.send(Frame(asdict(describe_end(device))))


def choose_link(
    link: StageLink, rank: int, limits: PlanLimits, device: torch.device, host: str, choose: Choose = choose_backend
) -> Link:
    """Agree with the other end; blocks until it has answered, or the link is closed.

    Args:
        link: Just opened, and ``introduce``d.
        rank: ``SENDER`` or ``RECEIVER`` of activations.
        limits: What activations must be like.
        device: Of this stage.
        host: Of the receiver: an address of its own, at which the sender reaches it.
        choose: Chooses the backend.

    Raises:
        PeerLost: The link has ended, or the other end says what is nonsense.
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
    """A group over a store of its own, which the receiver has."""
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
