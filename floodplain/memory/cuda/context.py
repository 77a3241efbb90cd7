"""Measures what another process takes of a GPU before it allocates anything: its context."""

from __future__ import annotations

import subprocess
import sys
import threading

import torch

from floodplain.core.errors import UserError

PROGRAM = """
import ctypes, sys

cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()

def expect_done(name, *args):
    status = getattr(cuda, name)(*args)
    if status:
        sys.exit(f"{name} failed: CUresult {status}")

expect_done("cuInit", 0)
expect_done("cuDeviceGet", ctypes.byref(device), int(sys.argv[1]))
expect_done("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
print("there", flush=True)
sys.stdin.read()
"""
"""Makes a context on the device of that index, prints a line, and exits when its stdin is closed."""

_PATIENCE_S = 60.0


def measure_context_bytes(index: int, program: str = PROGRAM) -> int:
    """Bytes that a bare context of another process takes of CUDA device ``index``; runs for a second or two.

    Memory that other processes allocate or free there meanwhile changes the result, too. Raises ``UserError`` if no
    second process can make a context there.
    """
    before, _ = torch.cuda.mem_get_info(index)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(index)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        patience = threading.Timer(_PATIENCE_S, child.kill)
        patience.start()
        try:
            assert child.stdout is not None, "it was asked for"
            is_there = child.stdout.readline() == "there\n"
            after, _ = torch.cuda.mem_get_info(index)
            _, problem = child.communicate()
        finally:
            patience.cancel()
    if not is_there:
        reason = (problem.strip().splitlines() or ["it says nothing"])[-1]
        raise UserError(f"CUDA device {index} has no room for a borrower's process: {reason}")
    return max(0, int(before) - int(after))
