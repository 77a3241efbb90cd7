"""Clusters in YAML: read as they are written, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.files.profile import Profile
from floodplain.planner.cluster import Model, Server, Spot, Unit
from floodplain.planner.inputs import read_cluster
from floodplain.planner.placement import to_document
from floodplain.planner.placer import place

GB = 10**9
WHOLE = """
servers:
  - {name: h100, count: 2, gpus: 8, memory: 80GB, domain: rack, link: 450GB}
  - {name: a100, gpus: 2, memory: 40GB}
models:
  - {name: llama-8b, count: 3, lends: 25GB}
  - {name: yi-34b, tensor_parallel: 2, pipeline_parallel: 2, needs: 20GB, servers: [h100, a100], move_cost: 4}
  - {name: idle, servers: h100-1}
apart:
  - [yi-34b, idle]
consumers_per_producer: 2
within: 0.1
"""


IDLE = {"model": "idle", "instance": 0, "stage": 0, "gpus": [0]}


def write(folder: Path, content: Any) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_a_cluster_is_read_as_it_is_written(tmp_path: Path) -> None:
    cluster = read_cluster(write(tmp_path, WHOLE))
    assert cluster.servers == (
        Server("h100-0", 8, 80 * GB, "rack", 450 * GB),
        Server("h100-1", 8, 80 * GB, "rack", 450 * GB),
        Server("a100", 2, 40 * GB, "a100", 0),
    )
    assert cluster.models == (
        Model("llama-8b", 3, 1, 1, 25 * GB),
        Model("yi-34b", 1, 2, 2, -20 * GB, frozenset({"h100-0", "h100-1", "a100"}), 4),
        Model("idle", 1, 1, 1, 0, frozenset({"h100-1"})),
    )
    assert cluster.apart == (frozenset({"yi-34b", "idle"}),)
    assert (cluster.current, cluster.consumers_per_producer, cluster.within) == ({}, 2, 0.1)


def change(section: str, place: int, **values: Any) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(WHOLE)
    content[section][place].update(values)
    return content


def whole(**values: Any) -> dict[str, Any]:
    return {**yaml.safe_load(WHOLE), **values}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "servers is missing"),
        ("- a", "must hold lines KEY: VALUE"),
        ("a: &x 1\nb: *x", "aliases are not supported"),
        ("a: [[[[[[1]]]]]]", "nested deeper than 5 levels"),
        (whole(servers=[]), "servers must be a list of at least one"),
        (whole(servers=[3]), "servers[0] must hold KEY: VALUE"),
        (whole(models=None), "models must be a list of at least one"),
        (whole(gpu=1), "unknown key 'gpu'; there are servers, models, apart, current"),
        (change("servers", 1, gpus=0), "servers[1]: gpus must be a whole number between 1 and 1024, not 0"),
        (change("servers", 1, gpus=True), "gpus must be a whole number"),
        (change("servers", 1, memory="lots"), "servers[1]: memory 'lots' is no size"),
        (change("servers", 1, memory="100TB"), "servers[1]: memory is out of range"),
        (change("servers", 1, name="a b"), "servers[1]: name must be 1 to 48 letters"),
        (change("servers", 1, name="h100-1"), "servers: there are two of h100-1"),
        (change("servers", 0, count=2**18), "a cluster has at most 262144 GPUs"),
        (change("servers", 1, domain=3), "servers[1]: domain must be text"),
        (change("models", 0, name="idle"), "models: there are two of idle"),
        (change("models", 0, count=2**18), "a cluster has at most 262144 GPUs, and there are more units of models"),
        (change("models", 0, needs="1GB"), "models[0]: llama-8b lends or needs memory, not both"),
        (
            change("models", 0, lends="90GB"),
            "llama-8b lends 83.82 GiB of a GPU, and none has more than 74.51 GiB: lower its lends",
        ),
        (
            {"servers": [{"name": "a", "gpu": 8, "memory": "80GB"}]},
            "servers[0]: unknown key 'gpu' (did you mean gpus?)",
        ),
        (whole(appart=[]), "unknown key 'appart' (did you mean apart?)"),
        (whole(appart=[], gpu=1), "unknown key 'appart', 'gpu'; there are servers"),
        (change("models", 0, tp=2), "models[0]: unknown key 'tp'; there are name, count, tensor_parallel"),
        (change("models", 1, servers=["h200"]), "models[1]: yi-34b is pinned to h200: no such server"),
        (change("models", 1, servers=[]), "models[1]: servers must be a list of names"),
        (change("models", 1, move_cost=-1), "move_cost must be a whole number between 0 and 1000000, not -1"),
        (whole(apart=[["opt"]]), "apart[0]: opt: no such model"),
        (whole(apart=["idle"]), "apart[0] must be a list of models"),
        (whole(within=2), "within must be between 0 and 1, not 2"),
        (whole(consumers_per_producer=0), "consumers_per_producer must be a whole number between 1 and"),
        (whole(current="none.json"), "none.json"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(tmp_path: Path, content: Any, told: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(UserError) as caught:
        read_cluster(path)
    message = str(caught.value)
    assert told in message and str(tmp_path) in message and "\n" not in message


def test_sizes_of_0_are_none(tmp_path: Path) -> None:
    content = change("models", 0, lends=0, needs=0)
    content["servers"][0]["link"] = 0
    cluster = read_cluster(write(tmp_path, content))
    assert cluster.models[0].memory_bytes == 0 and cluster.servers[0].link == 0


def test_a_placement_that_was_written_is_the_current_one_of_the_next(tmp_path: Path) -> None:
    cluster = read_cluster(write(tmp_path, WHOLE))
    document = to_document(cluster, place(cluster))
    (tmp_path / "now.json").write_text(json.dumps(document))
    again = read_cluster(write(tmp_path, whole(current="now.json")))
    assert again.current == place(cluster).spots
    assert place(again).num_moves == 0


def test_spots_that_no_unit_can_have_are_left_out(tmp_path: Path) -> None:
    cluster = read_cluster(write(tmp_path, WHOLE))
    (tmp_path / "now.json").write_text(json.dumps(to_document(cluster, place(cluster))))
    content = change("models", 0, count=1)
    content["models"][1]["tensor_parallel"] = 1
    content["models"][2]["name"] = "other"
    current = read_cluster(write(tmp_path, {**content, "apart": [], "current": "now.json"})).current
    assert list(current) == [Unit("llama-8b", 0, 0)]
    assert isinstance(current[Unit("llama-8b", 0, 0)], Spot)


@pytest.mark.parametrize(
    ("change_to", "told"),
    [
        ({"version": 2}, "is no placement of version 1"),
        ({"kind": "x"}, "is no placement of version 1"),
        ({"servers": 3}, "is no placement as floodplain place writes it"),
        ({"servers": [{"name": "h100-0", "units": [{**IDLE, "gpus": []}]}]}, "one GPU, or one is on none"),
        ({"servers": [{"name": "h100-0", "units": [{**IDLE, "gpus": [0, -1]}]}]}, "one is on none"),
        ({"servers": [{"name": "h100-0", "units": [IDLE, {**IDLE, "instance": 1}]}]}, "two units are on one GPU"),
    ],
)  # fmt: skip
def test_what_is_no_placement_is_refused(tmp_path: Path, change_to: dict[str, Any], told: str) -> None:
    cluster = read_cluster(write(tmp_path, WHOLE))
    (tmp_path / "now.json").write_text(json.dumps(to_document(cluster, place(cluster)) | change_to))
    with pytest.raises(UserError, match=told):
        read_cluster(write(tmp_path, whole(current="now.json")))


# -- r_m of a model by its profiles ------------------------------------------------------------------------------------


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
        ({"profile": STEP}, "step.json is a profile of kind 'step'; wanted here: llm, media, swap"),
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
