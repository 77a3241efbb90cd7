"""Memory on a neighbour GPU, with a fake driver: allocation, access rights, refusals; names of GPUs."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from floodplain.core.errors import InvariantError, UserError
from floodplain.memory.cuda.driver import CudaDriver
from floodplain.memory.cuda.peer import (
    CudaExtent,
    CudaPeerMemory,
    claim_cuda_home,
    find_cuda_home,
    find_obstacle,
    format_uuid,
)
from floodplain.memory.host.device import open_home_device
from tests.fakes.cuda_driver import PAGE_BYTES, CUresult, FakeDriver, Gpu
from tests.support import forks
from tests.support.host_devices import open_device

HOME, NEIGHBOUR, FAR = (bytes([number]) * 16 for number in range(3))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDriver]:
    """Two GPUs that are peers, and one without peers; each, including our own, is an engine's home."""
    gpus = Gpu(HOME, peers={NEIGHBOUR}), Gpu(NEIGHBOUR, num_pages=8, peers={HOME}), Gpu(FAR)
    driver = FakeDriver(*gpus).install(monkeypatch)
    names = {"same": HOME, "near": NEIGHBOUR, "far": FAR, "hidden": b"?" * 16}
    homes = [claim_cuda_home(name, uuid, tmp_path) for name, uuid in names.items()]
    yield driver
    for home in homes:
        home.close()
    assert driver.is_idle
    assert [gpu.num_used_pages for gpu in gpus] == [0, 0, 0]


@pytest.fixture
def memory(driver: FakeDriver, tmp_path: Path) -> CudaPeerMemory:
    return CudaPeerMemory(0, tmp_path)


def allocate(memory: CudaPeerMemory, num_bytes: int, producer: str = "near") -> CudaExtent:
    extent = memory.allocate(producer, num_bytes)
    assert extent is not None
    return extent


@pytest.mark.parametrize("producer", ["near", "same"])
@pytest.mark.parametrize(("num_bytes", "num_pages"), [(PAGE_BYTES, 1), (3 * PAGE_BYTES - 1, 2), (8 * PAGE_BYTES, 8)])
def test_an_extent_has_the_whole_pages_of_its_lease_on_the_producer(
    driver: FakeDriver, memory: CudaPeerMemory, producer: str, num_bytes: int, num_pages: int
) -> None:
    extent = allocate(memory, num_bytes, producer)
    assert extent.num_bytes == num_pages * PAGE_BYTES
    used = [num_pages, 0, 0] if producer == "same" else [0, num_pages, 0]
    assert [gpu.num_used_pages for gpu in driver.gpus] == used
    extent.close()
    extent.close()


def test_our_own_device_may_copy_there_and_back(driver: FakeDriver, memory: CudaPeerMemory) -> None:
    extent, own = allocate(memory, 2 * PAGE_BYTES), ctypes.create_string_buffer(b"bytes" * 100)
    other = ctypes.create_string_buffer(500)
    driver.cuMemcpyDtoDAsync(extent.address + 70_000, ctypes.addressof(own), 500, 0)
    driver.cuMemcpyDtoDAsync(ctypes.addressof(other), extent.address + 70_000, 500, 0)
    assert other.raw == own.raw[:500]
    driver.home = 1
    with pytest.raises(AssertionError, match="may not touch"):  # no other device was given the right
        driver.cuMemcpyDtoDAsync(extent.address, ctypes.addressof(own), 500, 0)
    extent.close()


def test_tensors_of_inaccessible_memory_are_refused(driver: FakeDriver, memory: CudaPeerMemory) -> None:
    extent = allocate(memory, PAGE_BYTES)
    for shape, message in (((1,), "on another GPU has no tensor"), ((PAGE_BYTES + 1,), "larger than its extent")):
        with pytest.raises(InvariantError, match=message):
            extent.tensor(torch.uint8, shape)
    extent.close()
    with pytest.raises(InvariantError, match="closed"):
        extent.tensor(torch.uint8, (1,))


def test_less_than_a_page_and_more_than_is_free_is_none(driver: FakeDriver, memory: CudaPeerMemory) -> None:
    assert memory.allocate("near", PAGE_BYTES - 1) is None
    first = allocate(memory, 5 * PAGE_BYTES)
    assert memory.allocate("near", 4 * PAGE_BYTES) is None
    assert driver.gpus[1].num_used_pages == 5
    first.close()


@pytest.mark.parametrize(
    ("call", "status", "message"),
    [
        ("cuMemCreate", CUresult.CUDA_ERROR_UNKNOWN, "refused by the driver: cuMemCreate: CUDA_ERROR_UNKNOWN$"),
        ("cuMemSetAccess", CUresult.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "cuMemSetAccess: CUDA_ERROR_PEER_ACCESS"),
    ],
)
def test_what_the_driver_refuses_is_refused_with_its_message_and_undone(
    driver: FakeDriver, memory: CudaPeerMemory, call: str, status: CUresult, message: str
) -> None:
    driver.refusals[call] = status
    with pytest.raises(UserError, match=message):
        memory.allocate("near", PAGE_BYTES)
    assert driver.is_idle


def test_an_extent_that_cannot_be_given_back_is_loud(driver: FakeDriver, memory: CudaPeerMemory) -> None:
    extent = allocate(memory, PAGE_BYTES)
    driver.refusals["cuMemUnmap"] = CUresult.CUDA_ERROR_UNKNOWN
    with pytest.raises(InvariantError):
        extent.close()
    del driver.refusals["cuMemUnmap"]
    driver.cuMemUnmap(extent.address, PAGE_BYTES)
    driver.cuMemAddressFree(extent.address, PAGE_BYTES)


@pytest.mark.parametrize(
    ("producer", "message"),
    [
        ("nobody", "^there is no device .*: start the process that lends it, on this machine$"),
        ("hidden", "^hidden computes on GPU-3f3f.*, which this process does not see: add it to CUDA_VISIBLE_DEVICES$"),
        ("far", "^memory of far cannot be used here: CUDA devices 0 and 2 have no peer access: nvidia-smi topo"),
    ],
)
def test_an_unreachable_producer_is_one_line(memory: CudaPeerMemory, producer: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        memory.allocate(producer, PAGE_BYTES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "indices", "message"),
    [
        ({"compute_mode": 3}, (0, 1), "CUDA device 1 is kept for one process or for none"),
        ({"compute_mode": 2}, (1, 1), "CUDA device 1 is kept for one process or for none"),
        ({"has_virtual_memory": False}, (0, 1), "CUDA device 1 has no virtual memory management"),
        ({"name": "NVIDIA H100 MIG 1g.10gb"}, (0, 1), "CUDA devices 0 and 1 are not both whole GPUs"),
        ({"name": "NVIDIA H100 MIG 1g.10gb"}, (1, 0), "CUDA devices 1 and 0 are not both whole GPUs"),
        ({"name": "NVIDIA H100 MIG 1g.10gb"}, (1, 1), None),
        ({"peers": set()}, (1, 0), "CUDA devices 1 and 0 have no peer access"),
        ({"peers": set()}, (0, 1), None),
        ({}, (0, 1), None),
    ],
)
def test_what_stands_between_two_devices(
    driver: FakeDriver, changes: dict[str, object], indices: tuple[int, int], message: str | None
) -> None:
    for name, value in changes.items():
        setattr(driver.gpus[1], name, value)
    found = find_obstacle(*(CudaDriver(index) for index in indices))
    assert found is None if message is None else found is not None and found.startswith(message)


def test_where_nothing_can_be_borrowed_the_error_comes_at_once(driver: FakeDriver, tmp_path: Path) -> None:
    for gpu in driver.gpus[:2]:
        gpu.compute_mode = 3
    with pytest.raises(UserError, match=r"^no GPU that this process sees can be borrowed from: CUDA device 0 is kept"):
        CudaPeerMemory(0, tmp_path)


def test_what_can_be_borrowed_from_is_logged(
    driver: FakeDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="floodplain")
    CudaPeerMemory(0, tmp_path)
    assert [record.message.partition(") ")[2][:22] for record in caplog.records] == [
        "can be borrowed from", "can be borrowed from", "cannot: CUDA devices 0",
    ]  # fmt: skip


def test_a_mig_instance_gets_an_error_with_what_it_can_borrow_from(driver: FakeDriver, tmp_path: Path) -> None:
    driver.gpus[0].name = "NVIDIA H100 MIG 1g.10gb"
    memory = CudaPeerMemory(0, tmp_path)
    with pytest.raises(UserError, match="does not see: a MIG instance reaches no memory but its own"):
        memory.allocate("hidden", PAGE_BYTES)
    allocate(memory, PAGE_BYTES, "same").close()


def test_threads_take_and_give_back_at_once(driver: FakeDriver, memory: CudaPeerMemory) -> None:
    """Two threads that close the same extent close it once."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(50):
                if extent := memory.allocate("near", PAGE_BYTES):
                    closers = [threading.Thread(target=extent.close) for _ in range(2)]
                    for closer in closers:
                        closer.start()
                    for closer in closers:
                        closer.join()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# -- names of GPUs -----------------------------------------------------------------------------------------------------


ONE, OTHER = bytes(range(16)), bytes(range(16, 32))


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_visitors_find_the_gpu_of_a_name_while_its_engine_is_at_home(tmp_path: Path) -> None:
    with claim_cuda_home("a", ONE, tmp_path) as home, claim_cuda_home("b", OTHER, tmp_path):
        assert (find_cuda_home("a", tmp_path), find_cuda_home("b", tmp_path)) == (ONE, OTHER)
    home.close()
    assert names_in(tmp_path) == []
    with pytest.raises(UserError, match=r"^there is no device .*floodplain-a: start the process that lends it"):
        find_cuda_home("a", tmp_path)


@pytest.mark.parametrize("device_uuid", [ONE, OTHER])
def test_a_name_is_one_engines_at_a_time(tmp_path: Path, device_uuid: bytes) -> None:
    with claim_cuda_home("a", ONE, tmp_path):
        with pytest.raises(UserError, match=r"floodplain-a is another engine's, which runs: use another name$"):
            claim_cuda_home("a", device_uuid, tmp_path)
        assert find_cuda_home("a", tmp_path) == ONE
    with claim_cuda_home("a", device_uuid, tmp_path):
        assert find_cuda_home("a", tmp_path) == device_uuid


def test_a_home_that_was_removed_by_hand_removes_no_other(tmp_path: Path) -> None:
    first = claim_cuda_home("a", ONE, tmp_path)
    (tmp_path / "floodplain-a").unlink()
    with claim_cuda_home("a", OTHER, tmp_path):
        first.close()
        assert find_cuda_home("a", tmp_path) == OTHER


def test_a_cpus_device_and_a_gpus_are_not_taken_for_each_other(tmp_path: Path) -> None:
    with open_device("cpu", 2**20, tmp_path), claim_cuda_home("gpu", ONE, tmp_path):
        for find in (find_cuda_home, lambda name, folder: claim_cuda_home(name, ONE, folder)):
            with pytest.raises(UserError, match="floodplain-cpu is no CUDA device of this version"):
                find("cpu", tmp_path)
        with pytest.raises(UserError, match="floodplain-gpu is no floodplain device of this version"):
            open_home_device("gpu", 2**20, tmp_path)


def test_files_of_others_and_bad_names_are_refused(tmp_path: Path) -> None:
    with claim_cuda_home("a", ONE, tmp_path):
        (tmp_path / "floodplain-a").chmod(0o644)
        for name, message in (("a", "own file with mode 0600"), ("a/b", "device name 'a/b' must be")):
            with pytest.raises(UserError, match=message):
                find_cuda_home(name, tmp_path)
    with pytest.raises(UserError, match=r"device folder .* does not exist"):
        claim_cuda_home("a", ONE, tmp_path / "nowhere")
    (tmp_path / "floodplain-l").symlink_to("floodplain-a")
    with pytest.raises(UserError, match="cannot open device"):
        claim_cuda_home("l", ONE, tmp_path)


def test_uuids_are_written_as_the_tools_write_them() -> None:
    assert format_uuid(ONE) == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


HOLDER = """
import sys
from pathlib import Path
from floodplain.memory.cuda.peer import claim_cuda_home
home = claim_cuda_home("a", bytes(range(16)), Path(sys.argv[1]))
print("home", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_what_a_killed_engine_left_is_known_and_replaced(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with forks.Popen(command, stdin=-1, stdout=-1, env=os.environ | {"OMP_NUM_THREADS": "1"}) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"home\n"
        assert find_cuda_home("a", tmp_path) == ONE
        child.kill()
    with pytest.raises(UserError, match=r"does not run any more: start it again$"):
        find_cuda_home("a", tmp_path)
    with claim_cuda_home("a", OTHER, tmp_path):
        assert find_cuda_home("a", tmp_path) == OTHER
    assert names_in(tmp_path) == []
