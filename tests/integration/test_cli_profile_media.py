"""``floodplain profile media`` as a user runs it: a function, a torch module, and a tiny pipeline of diffusers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from floodplain.cli.main import main
from floodplain.files.profile import Profile, read_profile
from floodplain.planner.inputs import read_cluster
from tests.support.refusals import Refuse

pytestmark = pytest.mark.slow

GB = 10**9
QUICK = ("--max-batch", "2", "--repeats", "1", "--min-seconds", "0", "--device", "cpu", "-q")
SOURCE = """
import torch

def generate(batch):
    return torch.ones(batch, 1000).sum()

def grow(batch):
    return torch.ones(batch, 2**20).sum()

net = torch.nn.Linear(6, 2)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder with a user's module; measures in this process, as a fork lacks torch's threads."""
    monkeypatch.setattr("floodplain.cli.profile_media.in_own_process", lambda work, _: work())
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "media_model", raising=False)
    (tmp_path / "media_model.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def profiled(folder: Path, *flags: str) -> Profile:
    assert main(["profile", "media", *QUICK, "--out", "p.json", *flags]) == 0
    return read_profile(folder / "p.json", "media")


def test_a_profile_is_written_and_placed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = profiled(folder, "--target", "media_model:generate", "--memory", "40GB", "--threshold", "10GB")
    shown = capsys.readouterr().out
    assert "media profile of media_model:generate, measured on " in shown and "producer" in shown
    result = profile.result
    assert result["peak_bytes"] + result["free_bytes"] == result["total_bytes"] == 40 * GB
    assert (result["role"], result["threshold_bytes"]) == ("producer", 10 * GB)
    assert [each["batch"] for each in profile.tries] == [1, 2]
    assert profile.settings["memory"] == 40 * GB and profile.settings["seed"] == 0
    servers, models = [{"name": "a", "gpus": 1, "memory": "40GB"}], [{"name": "m", "profile": "p.json"}]
    (folder / "cluster.yaml").write_text(json.dumps({"servers": servers, "models": models}))
    assert read_cluster(folder / "cluster.yaml").models[0].memory_bytes == result["free_bytes"]


def test_little_that_is_free_makes_a_consumer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = profiled(folder, "--target", "media_model:generate", "--memory", "4GB", "--format", "json")
    assert profile.result["role"] == "consumer", "less than the 10 GB of the default"
    assert json.loads(capsys.readouterr().out)["result"] == profile.result


def test_a_torch_module_needs_the_shape_of_its_input(folder: Path) -> None:
    profile = profiled(folder, "--module", "media_model:net", "--shape", "5", "6")
    assert (profile.subject, profile.settings["shape"]) == ("media_model:net", [5, 6])


def test_a_tiny_pipeline_of_diffusers_is_measured_without_network(
    folder: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refuse
) -> None:
    diffusers = pytest.importorskip("diffusers")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("no network is needed"))
    blocks: dict[str, Any] = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    net = diffusers.UNet2DModel(
        sample_size=8, layers_per_block=1, block_out_channels=(8,), norm_num_groups=4, **blocks
    )  # fmt: skip
    diffusers.DDPMPipeline(net, diffusers.DDPMScheduler(num_train_timesteps=8)).save_pretrained(folder / "tiny")
    profile = profiled(folder, "--pipeline", "tiny", "--steps", "2")
    assert (profile.subject, profile.settings["steps"]) == ("tiny", 2)
    assert [each["verdict"] for each in profile.tries] == ["fits", "fits"]
    (folder / "empty").mkdir()
    assert refuse("profile", "media", *QUICK, "--pipeline", "empty").startswith("--pipeline empty: cannot be read")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((), "say what to measure by one of --target, --pipeline, --module, not by none"),
        (("--target", "a:b", "--module", "c:d", "--shape", "1"), "not by target and module"),
        (("--module", "c:d"), "--module needs --shape"),
        (("--target", "a:b", "--shape", "1"), "--module needs --shape"),
        (("--module", "c:d", "--shape", "0"), "--shape must be of whole numbers"),
        (("--target", "a:b", "--steps", "3"), "--steps is for --pipeline"),
        (("--target", "a:b", "--dtype", "float16"), "--dtype is for --pipeline and --module"),
        (("--target", "a:b", "--tolerance", "2"), "--tolerance must be above 0"),
        (("--target", "a:b", "--device", "tpu"), "--device"),
        (("--target", "media_model:grow", "--memory", "1MiB"), "a batch of one does not fit into 1 MiB"),
    ],
)
def test_bad_flags_are_one_line(flags: tuple[str, ...], told: str, refuse: Refuse) -> None:
    assert told in refuse("profile", "media", "-q", *flags)
