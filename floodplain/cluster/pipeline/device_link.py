"""A link between stages on GPUs: plans use a connection, activations go directly from device to device.

It has the methods of ``StageLink``. Transfers use torch.distributed (NCCL), in a process group of the two stages. A
transfer into this device starts only after its plan has arrived, so that none waits for a stage that has ended. If
the connection ends, the process group is aborted, which ends a blocked transfer. Not yet run on a GPU; tests run it
over gloo.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import torch

from floodplain.cluster.wire.frames import Frame
from floodplain.cluster.wire.plan_codec import PlanLimits
from floodplain.cluster.wire.stage_link import StageLink
from floodplain.core.errors import PeerLost

MAX_SENT = 16
"""Most unfinished transfers to the other stage; no pipeline has so many outstanding steps."""


class Link(Protocol):
    """One end of a connection between two stages.

    Attributes:
        carries_tensors: Whether ``Frame.tensor`` is sent; if False, activations are raw bytes of the frame.
    """

    carries_tensors: bool

    def send(self, frame: Frame) -> None:
        """Send a frame; see ``StageLink.send``."""

    def recv(self) -> Frame:
        """The next frame; see ``StageLink.recv``."""

    def close(self) -> None:
        """Close the link; see ``StageLink.close``."""


class PairGroup:
    """Sends tensors from one process to another, in order. ``abort`` may be called on any thread.

    Args:
        backend: A process group of two: ``ProcessGroupNCCL`` or ``ProcessGroupGloo``.
        peer: Rank of the other process.
        timeout: Longest wait for a transfer.
        store: The store through which the processes find each other; kept alive with the group.
    """

    def __init__(self, backend: Any, peer: int, timeout: timedelta, store: Any = None) -> None:
        self._backend, self._peer, self._timeout, self._store = backend, peer, timeout, store
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()  # a tensor lives until its transfer has ended

    def send(self, x: torch.Tensor) -> None:
        """Start to send a tensor; block on the oldest transfer while ``MAX_SENT`` may be unfinished.

        Raises:
            PeerLost: A transfer failed.
        """
        try:
            while len(self._sent) >= MAX_SENT:
                self._sent.popleft()[0].wait(self._timeout)
            x = x.contiguous()
            self._sent.append((self._backend.send([x], self._peer, 0), x))
        except RuntimeError as error:
            raise PeerLost(f"activations could not be sent ({error})") from None

    def recv(self, x: torch.Tensor) -> None:
        """Fill a contiguous tensor of exactly as many bytes as the peer sends; they are there on return.

        Raises:
            PeerLost: The transfer failed.
        """
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
    """One end of a link whose activations do not pass through host memory.

    Args:
        link: Carries everything else; closed with this object.
        group: Carries activations.
        limits: Bounds on the shape and dtype of activations.
        device: The device on which they arrive.
    """

    carries_tensors = True

    def __init__(self, link: StageLink, group: PairGroup, limits: PlanLimits, device: torch.device) -> None:
        self._link, self._group, self._limits, self._device = link, group, limits, device
        self._watch = threading.Thread(target=self._abort_at_end, name="floodplain-device-link", daemon=True)
        self._watch.start()

    def send(self, frame: Frame) -> None:
        """Send a frame, then start to send its tensor.

        Raises:
            PeerLost: The link has ended, or a transfer failed.
        """
        x = frame.tensor
        if x is None:
            self._link.send(frame)
            return
        self._link.send(replace(frame, body={**frame.body, "tensor": list(x.shape)}, tensor=None))
        self._group.send(x)

    def recv(self) -> Frame:
        """The next frame, with its tensor on this device.

        Raises:
            PeerLost: The link has ended, a transfer failed, or the tensor does not have the shape of activations.
        """
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
