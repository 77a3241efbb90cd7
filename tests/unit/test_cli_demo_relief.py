"""The demo of drop and restore: samples of the router's answers, runs of users' requests, written files."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.cluster.router.listings import GroupRow, Groups, InstanceRow, Listing
from floodplain.core.groups import GroupState
from floodplain.demo.other_load import LoadMeter
from floodplain.demo.page import print_cluster_summary, write_cluster_files
from floodplain.demo.relief import (
    FULL_RELIEF,
    PHASES,
    QUICK_RELIEF,
    describe_drop,
    is_at_end,
    relief_requests,
    runs_of,
    serve_words,
    summarise,
)
from floodplain.demo.users import Users
from floodplain.demo.watch import (
    ReliefSample,
    ReliefTotals,
    find_spans,
    has_restored,
    relief_sample_of,
    totals_of,
)
from floodplain.model.tokenizer import ByteTokenizer
from floodplain.workload.records import LoadRequest, RequestFailed, RequestRecord, TokenChunk
from tests.support.records import make_record
from tests.support.refusals import Refuse

SHOWN = ("dropping", "exchanging", "pipelined", "restoring")
METRICS = "# TYPE floodplain_group_usable_seconds counter\nfloodplain_group_usable_seconds_total 0.5\n"


def instance(state: str, requests: int, running: int, used: int, blocks: int) -> InstanceRow:
    return InstanceRow(
        epoch=1, slot=0, host="h", pid=1, stage=None, state=state, age_s=1.0, requests=requests, running=running,
        waiting=0, swapped=0, used_blocks=used, blocks=blocks, generated_tokens=0,
    )  # fmt: skip


def listing(*rows: InstanceRow, homeless: int = 0) -> dict[str, Any]:
    return Listing(instances=list(rows), without_instance=homeless, moved_requests=0, ends={}).model_dump()


def groups(state: str | None = None, on_their_way: int = 0) -> dict[str, Any]:
    rows = [] if state is None else [
        GroupRow(number=1, state=state, instances=[1, 2], names=["0", "1"], layers=[15, 15], blocks=480, own_blocks=128,
                 requests_on_their_way=on_their_way, seconds=0.1)
    ]  # fmt: skip
    seconds = {"dropped": 1.5, "restored": 4.0, "cancelled": 0.0, "ended": 0.0}
    changes = {"dropped": 1, "restored": 1}
    return Groups(
        groups=rows, entered={}, restored={1: 4.0}, changes=changes, seconds=seconds, carried_requests=7,
        recomputed_requests=2,
    ).model_dump()  # fmt: skip


def sample(time_s: float, phase: str, blocks: int = 128, used: int = 60) -> ReliefSample:
    return ReliefSample(time_s=time_s, phase=phase, used_blocks=used, blocks=blocks, num_running=3, num_waiting=1)


SEEN = [
    sample(0.0, "solo"), sample(4.0, "solo"), sample(5.0, "dropping"), sample(5.3, "exchanging", 448),
    sample(6.0, "pipelined", 480), sample(30.0, "restoring", 96), sample(34.0, "solo"), sample(37.0, "solo"),
]  # fmt: skip
TOTALS = ReliefTotals(
    num_drops=1, num_restores=1, usable_s=0.5, dropped_s=1.5, restored_s=4.0, num_carried=7, num_recomputed=2
)


def record(sent_s: float, error: str | None = None) -> RequestRecord:
    times_s = () if error else (sent_s + 0.5, sent_s + 0.6, sent_s + 0.7)
    return make_record(*times_s, sent_s=sent_s, finished_s=sent_s + 1.0, error=error)


RECORDS = [record(when) for when in (0.0, 1.0, 4.5, 5.0, 13.0, 20.0, 33.0)]


def test_a_sample_counts_the_requests_of_all_places() -> None:
    """7 are placed, of which 5 run; 2 have no instance."""
    seen = relief_sample_of(1.0, groups(), listing(instance("serving", 3, 3, 40, 64), instance("serving", 4, 2, 50, 64),
                                                   homeless=2))  # fmt: skip
    assert seen == ReliefSample(time_s=1.0, phase="solo", used_blocks=90, blocks=128, num_running=5, num_waiting=4)
    pair = instance("leading", 6, 6, 120, 480), instance("grouped", 0, 0, 0, 64)
    seen = relief_sample_of(2.0, groups("exchanging", on_their_way=5), listing(*pair), 128)
    assert (seen.phase, seen.blocks, seen.num_running, seen.num_waiting) == ("exchanging", 480, 6, 5)


def test_what_an_instance_sent_before_a_change_shows_no_step() -> None:
    """Stale reports: a leader's old pool, both sides of a restore, requests that ran before."""
    stale = instance("leading", 2, 8, 60, 64), instance("grouped", 0, 8, 60, 64)
    for state in ("dropping", "exchanging"):
        seen = relief_sample_of(1.0, groups(state), listing(*stale), 128)
        assert (seen.blocks, seen.num_running) == (128, 2)
    both = instance("serving", 2, 2, 30, 96), instance("serving", 2, 2, 30, 64)
    for after in (groups("closing"), groups()):
        assert relief_sample_of(1.0, after, listing(*both), 128).blocks == 128
    filling = instance("leading", 2, 2, 60, 96), instance("grouped", 0, 0, 0, 64)
    assert relief_sample_of(1.0, groups("filling"), listing(*filling), 128).blocks == 96
    assert relief_sample_of(1.0, groups(), listing(*both)).blocks == 160, "without a bound the step would show"


def test_every_state_of_a_live_group_is_shown() -> None:
    pair = instance("leading", 0, 0, 0, 480), instance("grouped", 0, 0, 0, 64)
    phases = {state: relief_sample_of(0.0, groups(state), listing(*pair)).phase for state in GroupState}
    assert {state for state, phase in phases.items() if phase == "solo"} == {GroupState.SOLO, GroupState.OVER}
    assert set(phases.values()) == {"solo", *SHOWN}


@given(st.lists(st.sampled_from(("solo", *SHOWN)), max_size=12))
def test_spans_cover_each_sample_of_their_phase_and_no_other(phases: list[str]) -> None:
    samples = [sample(float(i), phase) for i, phase in enumerate(phases)]
    spans = find_spans(samples)
    for one in samples[:-1]:
        around = [span["phase"] for span in spans if span["from_s"] <= one.time_s < span["to_s"]]
        assert around == ([] if one.phase == "solo" else [one.phase])
    assert all(a["to_s"] <= b["from_s"] for a, b in pairwise(spans))


def test_the_scene_ends_after_the_restore_or_when_none_will_come() -> None:
    scale = replace(QUICK_RELIEF, spike_s=4.0, calm_s=14.0, give_up_s=60.0)
    assert has_restored(SEEN) and is_at_end(SEEN, 37.0, scale)
    assert not is_at_end(SEEN[:-2], 33.0, scale), "layers are being loaded"
    assert not is_at_end(SEEN[:5], 40.0, scale)
    assert is_at_end(SEEN[:5], 60.0, scale)
    assert not is_at_end(SEEN[:2], 20.0, scale)
    assert is_at_end(SEEN[:2], 24.0, scale), "no layer was dropped"
    assert not is_at_end(SEEN, 13.0, scale), "the spike goes on"


def test_each_request_counts_in_the_phase_in_which_it_was_sent() -> None:
    runs = dict(runs_of([*RECORDS, record(15.0, "gone")], "m", 0, QUICK_RELIEF))
    assert list(runs) == list(PHASES)
    assert [(run["completed"], run["failed"]) for run in runs.values()] == [(2, 0), (3, 0), (2, 1)]
    for run in runs.values():
        assert run["median_ttft_ms"] == pytest.approx(500)
        assert run["median_tpot_ms"] == pytest.approx(100)
    assert runs["after"]["duration"] == pytest.approx(20.0), "counted from the end of the spike"


def test_the_page_shows_the_drop_and_its_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert totals_of(groups(), METRICS) == TOTALS
    cluster = {"scene": asdict(QUICK_RELIEF), **summarise(RECORDS, SEEN, totals_of(groups(), METRICS))}
    assert cluster["blocks"] == {"before": 128, "dropped": 480, "most_used": 60}
    summary = write_cluster_files(
        tmp_path, runs_of(RECORDS, "m", 0, QUICK_RELIEF), cluster, LoadMeter(lambda: None).summary()
    )
    print_cluster_summary(tmp_path, summary, as_json=False)
    printed, page = capsys.readouterr().out, (tmp_path / "index.html").read_text()
    for text in ("128 KV blocks became 480", "0.50 s after the decision", "TPOT"):
        assert text in printed and text in page
    picture = (tmp_path / "cluster.svg").read_text()
    assert all(
        text in picture
        for text in (
            "128 KV blocks become 480 in a spike, usable in 0.50 s",
            "restored in 4.0 s",
            ">dropped: one pipeline<",
        )
    )
    saved = json.loads((tmp_path / "demo.json").read_text())
    assert [run["name"] for run in saved["runs"]] == list(PHASES)
    assert saved["cluster"]["totals"]["num_carried"] == 7 and (tmp_path / "cluster.png").exists()


def test_a_scene_without_a_drop_is_described_as_such() -> None:
    none = replace(TOTALS, num_drops=0, num_restores=0)
    assert "No layer was dropped" in describe_drop(summarise([], SEEN[:2], none))
    assert "not back" in describe_drop(summarise([], SEEN[:5], replace(TOTALS, num_restores=0)))


def test_the_two_other_demos_do_not_go_together(tmp_path: Path, refuse: Refuse) -> None:
    assert "--cluster does not go with --expansion" in refuse(
        "demo", "--cluster", "--expansion", "--out", str(tmp_path)
    )


class Scripted:
    """Answers requests with one token; number ``failing`` fails, and users stop after a dozen."""

    def __init__(self, failing: int) -> None:
        self.num_sent, self._failing = 0, failing
        self.users: Users | None = None

    async def send(self, request: LoadRequest) -> AsyncGenerator[TokenChunk, None]:
        self.num_sent += 1
        if self.num_sent >= 12 and self.users is not None:
            self.users.stop()
        if self.num_sent == self._failing:
            raise RequestFailed("gone")
        yield TokenChunk(time.monotonic(), "a", (1,))


async def test_a_user_whose_request_failed_leaves_and_others_go_on() -> None:
    requests = relief_requests(ByteTokenizer(256), 0, QUICK_RELIEF)[:5]
    target = Scripted(failing=3)
    users = target.users = Users(target, requests)
    await users.visit(2, 0.0)
    errors = [one.error for one in users.records]
    assert errors.count("gone") == 1 and len(errors) == target.num_sent >= 11
    assert all(a.sent_s <= b.finished_s for a, b in pairwise(users.records))


def test_calm_users_take_under_half_of_the_pools_and_all_users_over_both() -> None:
    """Otherwise layers would never be restored, or never be dropped."""
    for scale in (QUICK_RELIEF, FULL_RELIEF):
        sizes = [len(one.prompt_token_ids) + one.max_tokens for one in relief_requests(ByteTokenizer(256), 0, scale)]
        pools = 2 * scale.pool_blocks
        assert scale.num_users * -(-max(sizes) // 16) < pools / 2
        assert scale.num_spike_users * (sum(sizes) / len(sizes) - scale.max_output) / 16 > 0.9 * pools
        assert f"{scale.max_input + scale.max_output}" in serve_words("m", 0, scale, 4)
