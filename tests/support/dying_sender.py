"""A stage in its own process that sends one step whole, and of the next one the plan without its activations."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

import pytest
import torch

from floodplain.cluster.pipeline.device_link import SENDER, Choose, Link, choose_link, introduce
from floodplain.cluster.wire.frames import Frame
from floodplain.cluster.wire.plan_codec import PlanLimits
from floodplain.cluster.wire.stage_link import StageLink, accept_link, dial_link
from floodplain.core.errors import PeerLost
from tests.support.stage_links import KEY, MAX_DATA_BYTES, listen
from tests.support.waiting import HANG_S

HOST = "127.0.0.1"
NUM_ROWS = 5


def make_x(rows: int, limits: PlanLimits) -> torch.Tensor:
    """Return activations that both processes can compute."""
    return torch.randn(rows, limits.hidden_size, generator=torch.Generator().manual_seed(rows)).to(limits.dtype)


@contextmanager
def dying_sender(limits: PlanLimits, device: torch.device, choose: Choose) -> Iterator[tuple[StageLink, BaseProcess]]:
    """Yield the receiver's end of a fresh link, and the process at the other end."""
    with listen() as listener:
        args = (listener.getsockname()[1], limits, device, choose)
        process = multiprocessing.get_context("spawn").Process(target=_announce_then_die, args=args, daemon=True)
        process.start()
        link = None
        try:
            link = asyncio.run(asyncio.wait_for(accept_link(listener, KEY, MAX_DATA_BYTES), 60))
            yield link, process
        finally:
            if link is not None:
                link.close()
            process.kill()
            process.join()


def expect_death_in_mid_transfer(receiver: Link, link: StageLink, process: BaseProcess, limits: PlanLimits) -> None:
    """One step arrives bit for bit; then the sender is killed while this end waits for a tensor."""
    try:
        frame = receiver.recv()
        assert frame.tensor is not None and torch.equal(frame.tensor.cpu(), make_x(NUM_ROWS, limits))
        link.send(Frame({}))
        with pytest.raises(PeerLost):
            receiver.recv()
        process.join(HANG_S)
        assert process.exitcode == -signal.SIGKILL
    finally:
        receiver.close()


def _announce_then_die(port: int, limits: PlanLimits, device: torch.device, choose: Choose) -> None:
    link = asyncio.run(dial_link(HOST, port, KEY, MAX_DATA_BYTES))
    introduce(link, device)
    sender = choose_link(link, SENDER, limits, device, HOST, choose)
    sender.send(Frame({}, tensor=make_x(NUM_ROWS, limits).to(device)))
    link.send(Frame({"tensor": [NUM_ROWS, limits.hidden_size]}))
    link.recv()  # the other end has received the first step
    os.kill(os.getpid(), signal.SIGKILL)
