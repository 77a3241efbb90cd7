"""R_m of a model by its profiles: a producer's free bytes, or a consumer's swap space."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.files.profile import Profile
from floodplain.planner.inputs import read_cluster

GB = 10**9
PRODUCER, CONSUMER, SWAP, STEP = "producer.json", "consumer.json", "swap.json", "step.json"


def write_profiles(folder: Path, free: int = 40 * GB, needed: int = 6 * GB) -> None:
    llm = {"rate_rps": 2.5, "peak_kv_bytes": 3 * GB, "kv_bytes": 43 * GB, "free_bytes": free}
    swap = {"stable_rate_rps": 2.5, "needs_bytes": needed}
    step = {"base_s": 0.01, "decode_s": 0.001, "prefill_token_s": 1e-5}
    results = {
        PRODUCER: ("llm", llm | {"role": "producer"}), CONSUMER: ("llm", llm | {"role": "consumer"}),
        SWAP: ("swap", swap), STEP: ("step", step),
    }  # fmt: skip
    for name, (kind, result) in results.items():
        profile = Profile(kind=kind, subject="m", machine="a laptop", settings={}, result=result)
        (folder / name).write_text(json.dumps(profile.to_json()))


def read_memory(folder: Path, **model: Any) -> int:
    servers = [{"name": "a", "gpus": 2, "memory": "80GB"}]
    path = folder / "cluster.yaml"
    path.write_text(json.dumps({"servers": servers, "models": [{"name": "m", **model}]}))
    return read_cluster(path).models[0].memory_bytes


@pytest.mark.parametrize(
    ("named", "memory"),
    [
        (PRODUCER, 40 * GB),
        ([PRODUCER], 40 * GB),
        (CONSUMER, 0),
        (SWAP, -6 * GB),
        ([CONSUMER, SWAP], -6 * GB),
        ([SWAP, CONSUMER], -6 * GB),
        ([SWAP, PRODUCER], 40 * GB),
    ],
)
def test_profiles_give_what_a_model_lends_or_needs(named: Any, memory: int, tmp_path: Path) -> None:
    write_profiles(tmp_path)
    assert read_memory(tmp_path, profile=named) == memory


@given(st.integers(1, 2**62), st.integers(1, 2**62))
def test_a_profile_places_as_its_bytes_would(tmp_path_factory: pytest.TempPathFactory, free: int, needed: int) -> None:
    """If the profile is refused, so are the bytes."""
    folder = tmp_path_factory.mktemp("cluster")
    write_profiles(folder, free, needed)
    for profile, plain in ((PRODUCER, {"lends": f"{free}B"}), (SWAP, {"needs": f"{needed}B"})):
        told = []
        for model in ({"profile": profile}, plain):
            try:
                told.append(read_memory(folder, **model))
            except UserError:
                told.append(0)
        assert told[0] == told[1]


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"profile": PRODUCER, "lends": "1GB"}, "models[0]: profile says what m lends or needs: leave lends and needs"),
        ({"profile": SWAP, "needs": "1GB"}, "leave lends and needs out"),
        ({"profile": STEP}, "step.json is a profile of kind 'step', and llm, media, swap is wanted here"),
        ({"profile": [PRODUCER, CONSUMER]}, "models[0]: profile names 2 of kind llm or media, and one is wanted"),
        ({"profile": []}, "models[0]: profile must be a list of names"),
        ({"profile": "none.json"}, "none.json"),
        ({"profile": "cluster.yaml"}, "cluster.yaml is no profile"),
    ],
)
def test_what_makes_no_sense_is_refused(model: dict[str, Any], told: str, tmp_path: Path) -> None:
    write_profiles(tmp_path)
    with pytest.raises(UserError) as caught:
        read_memory(tmp_path, **model)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_more_than_a_gpu_can_have_is_refused(tmp_path: Path) -> None:
    write_profiles(tmp_path, needed=2**60)
    with pytest.raises(UserError, match="profile speaks of 1152921504606846976 bytes"):
        read_memory(tmp_path, profile=SWAP)
