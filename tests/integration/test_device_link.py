"""Links whose activations go by torch.distributed, over gloo: what arrives, what is refused, a killed peer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest
import torch

from floodplain.cluster.pipeline.device_link import (
    RECEIVER,
    SENDER,
    DeviceLink,
    EndFacts,
    Link,
    choose_backend,
    choose_link,
    introduce,
)
from floodplain.cluster.wire.frames import Frame
from floodplain.cluster.wire.plan_codec import PlanLimits
from floodplain.core.errors import InvariantError, PeerLost
from tests.support.dying_sender import HOST, dying_sender, expect_death_in_mid_transfer, make_x
from tests.support.gloo_links import CPU, choose_gloo, link_by_gloo
from tests.support.stage_links import linked

LIMITS = PlanLimits(
    num_blocks=4, max_model_len=64, max_batched_tokens=32, hidden_size=24, vocab_size=9, dtype=torch.bfloat16
)


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    with linked() as plain:
        pair = link_by_gloo(*plain, LIMITS)
        yield pair
        for end in pair:
            end.close()


def test_tensors_arrive_bit_for_bit_in_order_beside_frames_without(ends: tuple[Link, Link]) -> None:
    sender, receiver = ends
    sizes = [1, 32, 7, 1]
    for step, rows in enumerate(sizes):
        sender.send(Frame({"step": step}, tensor=make_x(rows, LIMITS)))
        sender.send(Frame({"plain": step}))
    for step, rows in enumerate(sizes):
        frame = receiver.recv()
        assert frame.body == {"step": step} and frame.tensor is not None
        assert torch.equal(frame.tensor, make_x(rows, LIMITS))
        assert receiver.recv().body == {"plain": step}


@pytest.mark.parametrize("shape", [[33, 24], [0, 24], [-1, 24], [3, 25], [3], [3, 24, 1], ["3", 24], "x", 7])
def test_a_shape_that_is_not_of_activations_is_refused_unread(shape: object, ends: tuple[Link, Link]) -> None:
    sender, receiver = ends
    cast(DeviceLink, sender)._link.send(Frame({"tensor": shape}))
    with pytest.raises(PeerLost, match="sends activations"):
        receiver.recv()


def test_a_link_that_is_closed_ends_both_ends(ends: tuple[Link, Link]) -> None:
    sender, receiver = ends
    sender.close()
    with pytest.raises(PeerLost, match="hung up"):
        receiver.recv()
    with pytest.raises(PeerLost):
        sender.send(Frame({}, tensor=make_x(3, LIMITS)))


def test_a_plain_connection_takes_no_tensor() -> None:
    with linked() as (sender, _), pytest.raises(InvariantError, match="carries none"):
        sender.send(Frame({}, tensor=make_x(3, LIMITS)))


def test_a_stage_that_is_killed_in_mid_transfer_ends_the_recv_that_waits() -> None:
    with dying_sender(LIMITS, CPU, choose_gloo) as (link, process):
        introduce(link, CPU)
        receiver = choose_link(link, RECEIVER, LIMITS, CPU, HOST, choose_gloo)
        expect_death_in_mid_transfer(receiver, link, process, LIMITS)


def test_a_neighbour_with_an_invalid_introduction_is_lost() -> None:
    with linked() as (sender, receiver):
        sender.send(Frame({"device": 3}))
        with pytest.raises(PeerLost, match="no process group"):
            choose_link(receiver, RECEIVER, LIMITS, CPU, HOST)


def test_stages_on_a_cpu_keep_their_connection() -> None:
    with linked() as (sender, receiver):
        for end in (sender, receiver):
            introduce(end, CPU)
        assert choose_link(receiver, RECEIVER, LIMITS, CPU, HOST) is receiver
        assert choose_link(sender, SENDER, LIMITS, CPU, HOST) is sender


GPU = EndFacts("GPU-a", has_nccl=True)


@pytest.mark.parametrize(
    ("other", "chosen"),
    [
        (EndFacts("GPU-b", has_nccl=True), "nccl"),
        (GPU, None),  # two processes on one GPU
        (EndFacts("", has_nccl=True), None),
        (replace(GPU, device="GPU-b", has_nccl=False), None),
    ],
)
def test_both_ends_choose_nccl_between_two_gpus_only(other: EndFacts, chosen: str | None) -> None:
    assert choose_backend(GPU, other) == choose_backend(other, GPU) == chosen
