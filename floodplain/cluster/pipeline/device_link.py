"""Links whose activations go from GPU to GPU, and the choice between these and links through host memory.

A ``DeviceLink`` sends plans over a ``StageLink``, and activations by torch.distributed (NCCL), in a process group of
the two stages. A transfer into this device starts only after its plan has arrived, so that none waits for a stage that
has ended. If the connection ends, the process group is aborted, which ends a blocked transfer.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from floodplain.cluster.wire.frames import Frame
from floodplain.cluster.wire.plan_codec import PlanLimits
from floodplain.cluster.wire.stage_link import StageLink
from floodplain.core.codec import WireError, from_json
from floodplain.core.errors import PeerLost

MAX_SENT = 16
"""Most unfinished transfers to the other stage; no pipeline has so many outstanding steps."""


class PairGroup:
    """Sends tensors to rank ``peer`` of a process group of two, in order. ``abort`` may be called on any thread.

    ``backend`` is a ``ProcessGroupNCCL`` or ``ProcessGroupGloo``, ``timeout`` the longest wait for a transfer, and
    ``store`` the store of the group, which lives as long.
    """

    def __init__(self, backend: Any, peer: int, timeout: timedelta, store: Any = None) -> None:
        self._backend, self._peer, self._timeout, self._store = backend, peer, timeout, store
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()  # a tensor lives until its transfer has ended

    def send(self, x: torch.Tensor) -> None:
        """Start to send a tensor; blocks while ``MAX_SENT`` are unfinished. ``PeerLost`` if a transfer failed."""
        try:
            while len(self._sent) >= MAX_SENT:
                self._sent.popleft()[0].wait(self._timeout)
            x = x.contiguous()
            self._sent.append((self._backend.send([x], self._peer, 0), x))
        except RuntimeError as error:
            raise PeerLost(f"activations could not be sent ({error})") from None

    def recv(self, x: torch.Tensor) -> None:
        """Fill a contiguous tensor with exactly the bytes that the peer sends. ``PeerLost`` if the transfer failed."""
        try:
            self._backend.recv([x], self._peer, 0).wait(self._timeout)
            if x.is_cuda:  # NCCL's wait makes only the stream wait
                torch.cuda.current_stream(x.device).synchronize()
        except RuntimeError as error:
            raise PeerLost(f"activations did not arrive ({error})") from None

    def abort(self) -> None:
        """Abort all transfers. Over gloo a blocked one ends only with the peer's process, or by the timeout."""
        with contextlib.suppress(RuntimeError):  # already aborted
            self._backend.abort()


class DeviceLink:
    """One end of a link whose activations go by ``group``, all else by ``link``, which is closed with this object.

    ``limits`` bound the shape and dtype of activations, which arrive on ``device``.
    """

    carries_tensors = True

    def __init__(self, link: StageLink, group: PairGroup, limits: PlanLimits, device: torch.device) -> None:
        self._link, self._group, self._limits, self._device = link, group, limits, device
        self._watch = threading.Thread(target=self._abort_at_end, name="floodplain-device-link", daemon=True)
        self._watch.start()

    def send(self, frame: Frame) -> None:
        """Send a frame, then start to send its tensor. Raises ``PeerLost`` if the link ended or a transfer failed."""
        x = frame.tensor
        if x is None:
            self._link.send(frame)
            return
        self._link.send(replace(frame, body={**frame.body, "tensor": list(x.shape)}, tensor=None))
        self._group.send(x)

    def recv(self) -> Frame:
        """The next frame, its tensor on this device. ``PeerLost`` if the link or a transfer failed, or it is wrong."""
        frame = self._link.recv()
        shape = frame.body.pop("tensor", None)
        if shape is None:
            return frame
        x = torch.empty(self._check(shape), dtype=self._limits.dtype, device=self._device)
        self._group.recv(x)
        if self._link.has_ended:  # an aborted transfer may leave anything in the tensor
            raise PeerLost("a stage hung up while activations were sent")
        return replace(frame, tensor=x)

    def close(self) -> None:
        """Close the link; a blocked call raises ``PeerLost``. Safe to call twice, on any thread."""
        self._link.close()
        self._watch.join()

    def _check(self, shape: object) -> tuple[int, int]:
        """The shape, if allowed. Checked before a byte is received: gloo ends the process if sizes do not match."""
        most, width = self._limits.max_batched_tokens, self._limits.hidden_size
        match shape:
            case [int(rows), int(columns)] if 0 < rows <= most and columns == width:
                return rows, columns
        raise PeerLost(f"a stage sends activations {shape}, not up to {most} rows of {width}")

    def _abort_at_end(self) -> None:
        self._link.wait_end()
        self._group.abort()


Link = StageLink | DeviceLink
"""One end of a connection between two stages; if not ``carries_tensors``, activations are raw bytes of frames."""

logger = logging.getLogger(__name__)

FIND_TIMEOUT = timedelta(seconds=10)
"""Longest time for the two processes of a group to find each other."""
GLOO_TIMEOUT = timedelta(seconds=10)
NCCL_TIMEOUT = timedelta(days=1)
"""The router detects a silent stage and ends the link; with a shorter value torch's watchdog would end this process."""
SENDER, RECEIVER = 0, 1


@dataclass(frozen=True, slots=True)
class EndFacts:
    """The facts of one end of a link: the GPU's UUID, empty on a CPU, and whether its torch has NCCL."""

    device: str
    has_nccl: bool


Choose = Callable[[EndFacts, EndFacts], str | None]


def describe_end(device: torch.device) -> EndFacts:
    """The facts of an end on this device."""
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return EndFacts(uuid, dist.is_available() and dist.is_nccl_available())


def choose_backend(one: EndFacts, other: EndFacts) -> str | None:
    """The torch.distributed backend of activations; None: the host. NCCL refuses two processes on one GPU."""
    has_nccl = one.has_nccl and other.has_nccl
    return "nccl" if has_nccl and one.device and other.device and one.device != other.device else None


def introduce(link: StageLink, device: torch.device) -> None:
    """Send the facts of this end, as the first frame; both ends do so first. ``PeerLost`` if the link has ended."""
    link.send(Frame(asdict(describe_end(device))))


def choose_link(
    link: StageLink, rank: int, limits: PlanLimits, device: torch.device, host: str, choose: Choose = choose_backend
) -> Link:
    """Agree with the other end on a link. Blocks until it has answered, or the link is closed.

    ``link`` was just opened and ``introduce``d; ``rank`` is ``SENDER`` or ``RECEIVER`` of activations; ``host`` is the
    receiver's address for the sender. Raises ``PeerLost`` if the link has ended, the other end breaks the protocol, or
    no process group can be made.
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
