"""Device links between two ends in one process, over gloo: CPU tensors, sent as GPU tensors are over NCCL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from floodplain.cluster.pipeline import device_link
from floodplain.cluster.pipeline.device_link import RECEIVER, SENDER, EndFacts, Link, PairGroup, choose_link, introduce
from floodplain.cluster.wire.plan_codec import PlanLimits
from floodplain.cluster.wire.stage_link import StageLink
from tests.support.dying_sender import HOST
from tests.support.waiting import HANG_S

CPU = torch.device("cpu")


def choose_gloo(one: EndFacts, other: EndFacts) -> str:
    return "gloo"


class Forgetful(PairGroup):
    """Fault: a transfer reports its end without its content."""

    def recv(self, x: torch.Tensor) -> None:
        super().recv(x)
        x.zero_()


def link_by_gloo(
    sender: StageLink, receiver: StageLink, limits: PlanLimits, group_class: Any = PairGroup
) -> tuple[Link, Link]:
    """Return device links over both ends of a link."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setattr(device_link, "PairGroup", group_class)
        choose = partial(choose_link, limits=limits, device=CPU, host=HOST, choose=choose_gloo)
        for end in (sender, receiver):
            introduce(end, CPU)
        ends = [threads.submit(choose, end, rank) for end, rank in ((sender, SENDER), (receiver, RECEIVER))]
        return ends[0].result(HANG_S), ends[1].result(HANG_S)
