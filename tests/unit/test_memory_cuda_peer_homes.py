"""Names of GPUs: held by one engine at a time, found by borrowers while it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from floodplain.core.errors import UserError
from floodplain.memory.cuda.peer import claim_cuda_home, find_cuda_home, format_uuid
from floodplain.memory.host.device import open_home_device
from tests.support import forks
from tests.support.host_devices import open_device

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


HOME = """
import sys
from pathlib import Path
from floodplain.memory.cuda.peer import claim_cuda_home
home = claim_cuda_home("a", bytes(range(16)), Path(sys.argv[1]))
print("home", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_what_a_killed_engine_left_is_known_and_replaced(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOME, str(tmp_path)]
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
