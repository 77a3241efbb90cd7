"""Activations between two GPUs by NCCL arrive bit for bit; a transfer ends if its sender is killed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from floodplain.cluster.pipeline.device_link import RECEIVER, DeviceLink, choose_backend, choose_link, introduce
from floodplain.cluster.wire.plan_codec import PlanLimits
from tests.support.dying_sender import HOST, dying_sender, expect_death_in_mid_transfer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2 or not dist.is_nccl_available(), reason="no two CUDA devices with NCCL"
    ),
]

LIMITS = PlanLimits(
    num_blocks=4, max_model_len=64, max_batched_tokens=32, hidden_size=4096, vocab_size=9, dtype=torch.bfloat16
)


def test_tensors_cross_gpus_and_a_killed_sender_ends_the_waiting_recv() -> None:
    own = torch.device("cuda", 0)
    with dying_sender(LIMITS, torch.device("cuda", 1), choose_backend) as (link, process):
        introduce(link, own)
        receiver = choose_link(link, RECEIVER, LIMITS, own, HOST)
        assert isinstance(receiver, DeviceLink)
        expect_death_in_mid_transfer(receiver, link, process, LIMITS)
