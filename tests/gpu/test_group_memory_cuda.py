"""Pages of a group's member on a GPU: the laws of the host's (``tests/property/test_group_memory_laws.py``)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from floodplain.memory.arena import Page
from floodplain.memory.cuda.device import CudaDevice, open_cuda_device
from floodplain.model.attention.cuda import CudaAttention
from tests.support.attention import moved_attention
from tests.support.group_memory_machine import EVEN, ODD, GroupMachine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

TIMES_PAGE = 32
"""A page is 2 MiB here, and 64 KiB on the host: blocks are longer by this factor."""
SETTINGS = settings(max_examples=10, stateful_step_count=15, deadline=None, phases=[Phase.generate])


class CudaMachine(GroupMachine):
    """Two blocks to a page."""

    layout = replace(EVEN, block_tokens=TIMES_PAGE * EVEN.block_tokens)

    def open_device(self) -> CudaDevice:
        return open_cuda_device(0, max_bytes=2**28)

    def fail_drop(self, data: st.DataObject, pages: list[Page], *args: object) -> bool:
        return True  # the driver has no limit on mappings


class OddCudaMachine(CudaMachine):
    """Eight blocks to three pages."""

    layout = replace(ODD, block_tokens=TIMES_PAGE * ODD.block_tokens)


@pytest.mark.parametrize("machine", [CudaMachine, OddCudaMachine])
def test_used_blocks_and_parameters_keep_their_bytes_through_groups(machine: type[GroupMachine]) -> None:
    pytest.importorskip("cuda.bindings")
    run_state_machine_as_test(machine, settings=SETTINGS)


@pytest.mark.parametrize("forgets", [False, True])
def test_the_kernel_computes_the_same_over_moved_blocks(forgets: bool) -> None:
    """Control: with tables of the old block ids it differs."""
    pytest.importorskip("cuda.bindings")
    pytest.importorskip("triton")
    with open_cuda_device(0, max_bytes=2**28) as device:
        before, after = moved_attention(device, partial(CudaAttention, may_use_flashinfer=False), forgets)
        assert torch.equal(before, after) != forgets
