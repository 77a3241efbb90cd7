"""The demo's three ways on a model of random weights: the same requests, each with its own settings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from floodplain.core.errors import UserError
from floodplain.demo.alternation import repeated, serve_alternately
from floodplain.demo.burst import FULL, QUICK, Scale, check_part, engine_config, fit_pool, measure_machine, sample_spec
from floodplain.demo.leases import QUICK_SCENE
from floodplain.demo.other_load import LoadMeter, Reading
from floodplain.demo.page import print_summary, write_files
from floodplain.demo.ways import HOST_LINK, NEIGHBOUR_LINK, WAYS, Way, expansion_ways
from floodplain.engine.build import kv_bytes_per_token
from floodplain.engine.config import EngineConfig
from floodplain.model.tokenizer import ByteTokenizer
from floodplain.model.weights.open_model import open_model
from floodplain.observe.plots import draw_ttft
from floodplain.workload.spec import WorkloadSpec, build, parse_goodput
from tests.support.swapping import unknown_prices

NUM_REQUESTS = 16
BASE = EngineConfig(
    model="dummy:tiny-llama", policy="fcfs", swap="none", dtype="float32", kv_memory=2**18, max_model_len=128
)
SPEC = WorkloadSpec(
    request_rate=400.0, num_prompts=NUM_REQUESTS, max_input=40, max_output=48, ignore_eos=True, burst_factor=2.0,
    burst_start=0.01, burst_duration=0.02, goodput=("ttft:1000000", "tpot:1000000"),
)  # fmt: skip
NUM_REPEATS = 2


class Readings:
    """A meter's readings: other processes use a twentieth of two cores in every second that passes."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def __call__(self) -> Reading:
        self.time_s += 1.0
        return Reading(self.time_s, busy_s=1.6 * self.time_s, own_s=1.5 * self.time_s)


def meter() -> LoadMeter:
    return LoadMeter(Readings(), num_cores=2)


def serve(ways: Sequence[Way], base: EngineConfig, used: LoadMeter) -> list[tuple[str, dict[str, Any]]]:
    loads = repeated(SPEC, NUM_REPEATS)
    return asyncio.run(serve_alternately(ways, base, loads, {"measured_capacity": 1.0}, used, progress=False))


USED = meter()


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[str, Any]]:
    with unknown_prices():
        return dict(serve(WAYS, BASE, USED))


@pytest.mark.usefixtures("runs")
def test_ways_serve_every_burst_alternately() -> None:
    names = [way.name for way in WAYS]
    assert [part.name for part in USED.parts] == [*names, *reversed(names)]
    assert [part.share for part in USED.parts] == pytest.approx([0.05] * len(USED.parts))


def test_a_ways_clock_stands_still_between_its_bursts(runs: dict[str, dict[str, Any]]) -> None:
    """Its second burst begins at the last answer of the first one, whatever the other ways did in between."""
    for result in runs.values():
        begins_s = result["floodplain"]["bursts_s"]
        ends_s = [
            start_s + ttft_s + sum(gaps_s)
            for start_s, ttft_s, gaps_s in zip(result["start_times"], result["ttfts"], result["itls"], strict=True)
        ]
        assert begins_s[0] == 0.0 and max(ends_s[:NUM_REQUESTS]) <= begins_s[1]
        assert min(result["start_times"][NUM_REQUESTS:]) >= begins_s[1]
        assert min(result["floodplain"]["residence"]["arrival_s"][NUM_REQUESTS:]) >= begins_s[1]
        times_s = result["floodplain"]["timeline"]["time_s"]
        assert times_s == sorted(times_s) and times_s[-1] >= begins_s[1]
        assert result["duration"] >= max(ends_s)


def test_every_way_answers_the_same_requests(runs: dict[str, dict[str, Any]]) -> None:
    assert list(runs) == ["fcfs", "AQUA's switch", "floodplain"]
    for result in runs.values():
        assert result["failed"] == 0
        for key in ("request_ids", "input_lens", "output_lens"):
            assert result[key] == runs["fcfs"][key]


def test_every_way_has_the_settings_in_its_result(runs: dict[str, dict[str, Any]]) -> None:
    configs = {name: result["floodplain"]["config"] for name, result in runs.items()}
    assert [config["policy"] for config in configs.values()] == ["fcfs", "cfs", "timely"]
    assert [config["is_synchronous"] for config in configs.values()] == [False, True, False]
    hardware = {name: result["floodplain"]["hardware"] for name, result in runs.items()}
    assert [[link["name"] for link in each["links"]] for each in hardware.values()] == [
        [],
        [NEIGHBOUR_LINK],
        [HOST_LINK],
    ]
    factors = {each["links"][0]["slowdown"] for name, each in hardware.items() if name != "fcfs"}
    assert len(factors) == 1


@pytest.mark.parametrize("scale", [FULL, QUICK])
@pytest.mark.parametrize("num_prompts", [1, 19, 60, 110, 1000])
def test_slow_machines_outgrow_the_pool_and_it_holds_the_longest_request(scale: Scale, num_prompts: int) -> None:
    fitted = fit_pool(scale, num_prompts)
    assert fitted.num_resident <= scale.num_resident
    assert fitted == replace(scale, num_resident=fitted.num_resident)
    assert num_prompts < 18 or fitted.num_resident <= num_prompts / 3
    assert num_prompts < 72 or fitted == scale, "a quick machine has all"
    base = engine_config("dummy:tiny-llama", sample_spec(0, scale), fitted)
    source = open_model("dummy:tiny-llama")
    pool_tokens = (base.kv_memory or 0) / kv_bytes_per_token(source.config, base.dtype)
    assert pool_tokens - base.block_tokens > scale.max_input + scale.max_output


def test_a_model_whose_kv_fills_no_page_of_a_layer_cannot_stream() -> None:
    for scale in (FULL, QUICK):
        check_part(engine_config("dummy:smollm2-135m", sample_spec(0, scale), scale), scale)
    with pytest.raises(UserError, match=r"--expansion: KV of dummy:tiny-deep is so small .* leave --model out"):
        check_part(engine_config("dummy:tiny-deep", sample_spec(0, QUICK), QUICK), QUICK)


def test_every_request_has_a_row_in_the_strip(runs: dict[str, dict[str, Any]]) -> None:
    for result in runs.values():
        rows = result["floodplain"]["residence"]
        assert {len(column) for column in rows.values()} == {NUM_REPEATS * NUM_REQUESTS}
        assert all(rows["on_device_s"])
        assert min(rows["arrival_s"]) >= 0


def test_the_ways_that_serve_bursts_really_do(runs: dict[str, dict[str, Any]]) -> None:
    """All three ways preempt; only the two that take turns swap in."""
    facts = {name: result["floodplain"] for name, result in runs.items()}
    assert all(one["preemptions"] > 0 for one in facts.values())
    assert not facts["fcfs"]["swap"]["in_bytes"]
    for name in ("AQUA's switch", "floodplain"):
        assert facts[name]["swap"]["in_bytes"] > 0


def test_the_capacity_is_what_a_full_batch_and_its_decodes_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt step takes 2 s and a decode 0.1 s."""

    async def time_batch(engine: Any, spec: WorkloadSpec, num_tokens: int) -> float:
        assert not engine.engine.config.enable_prefix_caching
        return 2.0 + 0.1 * (num_tokens - 1)

    monkeypatch.setattr("floodplain.demo.burst._time_batch", time_batch)
    requests = build(SPEC, ByteTokenizer(256))
    mean_output = sum(request.max_tokens for request in requests) / len(requests)
    capacity, goals = asyncio.run(measure_machine(BASE, SPEC))
    assert capacity == pytest.approx(NUM_REQUESTS / (2.0 + 0.1 * mean_output))
    assert list(parse_goodput(goals)) == ["ttft", "tpot"]


@pytest.fixture
def one_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw one picture of a page only: all of them take seconds."""
    monkeypatch.setattr("floodplain.demo.page.draw_all", lambda runs: {"ttft": draw_ttft(runs)})
    monkeypatch.setattr("floodplain.demo.page.draw_beside_stock", lambda *_: None)


@pytest.mark.usefixtures("one_picture")
def test_a_part_of_the_memory_with_layers_that_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first two ways have half of the memory; only the second streams layers."""
    base = replace(BASE, model="dummy:tiny-deep", kv_memory=2**21)

    used = meter()
    runs = serve(expansion_ways(2), base, used)
    assert [result["failed"] for _, result in runs] == [0, 0, 0]
    small, same, large = (result["floodplain"]["config"]["kv_memory"] for _, result in runs)
    assert 2**20 <= small == same < 0.6 * large
    expansions = [result["floodplain"]["expansion"] for _, result in runs]
    assert [one["in_bytes"] > 0 for one in expansions] == [False, True, False]
    summary = write_files(tmp_path, QUICK, runs, None, used.summary(), expands=True)
    print_summary(tmp_path, summary, as_json=False)
    assert "expanded: " in capsys.readouterr().out
    page = (tmp_path / "index.html").read_text()
    assert "a part of the memory" in page and "layers of the KV cache stream" in page


LEASES: dict[str, Any] = {
    "scene": asdict(QUICK_SCENE),
    "recalls": {"num": 3, "mean_s": 1.25, "num_forced": 0},
    "most_lent_bytes": 2**26,
    "tokens_per_s": {"borrowing": 200.0, "without": None},
    "failed": 0,
    "samples": {
        name: [0.0, 1.0, 2.0]
        for name in ("time_s", "pool_bytes", "used_bytes", "lent_bytes", "peer_bytes", "host_bytes", "num_tokens")
    },
}


def test_the_page_shows_both_parts(
    runs: dict[str, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = write_files(tmp_path, QUICK, list(runs.items()), LEASES, USED.summary())
    page = (tmp_path / "index.html").read_text()
    assert "Memory lent between two servers" in page and "3 leases were taken back" in page
    assert json.loads((tmp_path / "demo.json").read_text())["leases"]["recalls"]["num"] == 3
    assert {path.name for path in tmp_path.glob("*.png")} >= {"ttft.png", "strip.png", "leases.png", "readme.png"}
    assert (tmp_path / "readme.png").stat().st_size < 250_000
    print_summary(tmp_path, summary, as_json=False)
    told = capsys.readouterr().out
    assert told.splitlines()[0].split() == ["floodplain", "fcfs"], "three numbers come first"
    assert told.splitlines()[2].split()[-4:] == ["100", "%", "100", "%"]
    assert "lent: at most 64 MiB; taken back: 3 leases, 1.25 s each, 0 by force" in told
    assert "other processes used at most 5 % of the cores" in told
    assert "requests that met both goals" in page[: page.index("A small language model")]


@pytest.mark.usefixtures("one_picture")
def test_the_first_part_is_kept_when_the_second_one_fails(runs: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    write_files(tmp_path, QUICK, list(runs.items()), None, USED.summary())
    assert "Memory lent" not in (tmp_path / "index.html").read_text()
    assert json.loads((tmp_path / "demo.json").read_text())["leases"] is None
    assert len(json.loads((tmp_path / "demo.json").read_text())["runs"]) == len(runs)
    assert not (tmp_path / "leases.png").exists()
