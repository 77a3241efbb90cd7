"""Clusters in virtual time: requests keep their tokens across drops and restores; parts equal older simulators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import pytest

from benchmarks.relief.model import VirtualModel, serve_cluster
from floodplain.core.free_blocks import BlockId
from floodplain.core.request import Request, SeqId
from floodplain.core.sampling import SamplingParams
from floodplain.core.tiers import Link, Tier
from floodplain.cost.step_time import StepCost, StepTimer
from floodplain.policy.drop import DropMoment, DropMove, DropSizes, DropTimingSettings
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.relief import ReliefLoad, ReliefRule
from floodplain.runtime.handover import Record
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopConfig
from floodplain.sim import regrouping
from floodplain.sim.cluster import VirtualCluster
from floodplain.sim.environment import Environment
from floodplain.sim.regrouping import GroupLink, Regrouping, Transition
from floodplain.sim.serving import VirtualDevice, serve
from floodplain.sim.stages import VirtualStages
from tests.support.pipeline_run import run_pipeline

MODEL = VirtualModel(
    cost=StepCost(base_s=0.02, decode_s=0.0005, prefill_token_s=0.0003),
    sizes=DropSizes(num_layers=12, layer_bytes=60_000, block_bytes=1_000),
    num_blocks=60,
    block_tokens=16,
    config=LoopConfig(max_model_len=640, max_num_seqs=64),
    hop_s=0.0002,
)
FAST, SLOW = GroupLink(3e6, 1e-7), GroupLink(3e5, 1e-7)
QUICK = DropTimingSettings(calm_s=1.0, gap_s=1.0)


def make_requests(seed: int, num_requests: int = 140) -> list[Request]:
    """Return a burst of two seconds, then a few late requests."""
    dice, requests = Random(seed), []
    for index in range(num_requests):
        is_late = index >= num_requests - 8
        arrival_s = 8.0 + 4 * dice.random() if is_late else 2 * dice.random()
        requests.append(
            Request(
                request_id=str(index),
                prompt_token_ids=(index,) * dice.randint(8, 120),
                params=SamplingParams(max_tokens=dice.randint(4, 80), ignore_eos=True, temperature=0.0),
                arrival_s=arrival_s,
            )
        )
    return requests


def run(seed: int, link: GroupLink = FAST, num_instances: int = 2) -> tuple[VirtualCluster, list[Transition]]:
    cluster = VirtualCluster(Environment())
    rule = ReliefRule(QUICK, is_priced=False, most_stages=4)
    groups = Regrouping(cluster, MODEL.groups_in(cluster.environment), link, num_instances, rule)
    cluster.environment.schedule(0.0, groups.look)
    serve_cluster(cluster, make_requests(seed, 70 * num_instances))
    return cluster, groups.transitions


def count_wrong(cluster: VirtualCluster, requests: list[Request]) -> int:
    """Count requests without exactly their tokens, in order and after the arrival."""
    num_wrong = 0
    for request in requests:
        times = cluster.token_times_s(request.request_id)
        num_wrong += len(times) != request.params.max_tokens or times != sorted(times) or times[0] < request.arrival_s
    return num_wrong


@pytest.mark.parametrize(("seed", "link", "num_instances"), [(1, FAST, 2), (2, SLOW, 2), (3, FAST, 4), (4, SLOW, 3)])
def test_every_request_gets_its_tokens_across_a_drop_and_a_restore(
    seed: int, link: GroupLink, num_instances: int
) -> None:
    cluster, transitions = run(seed, link, num_instances)
    kinds = [transition.is_drop for transition in transitions]
    assert True in kinds and False in kinds
    assert count_wrong(cluster, make_requests(seed, 70 * num_instances)) == 0
    assert max(len(lives) for lives in cluster.stories.values()) >= 2  # some were handed over
    for engine in cluster.engines.values():
        engine.loop.check_integrity()
        assert engine.loop.state.num_returning_blocks == 0
        assert engine.loop.state.ledger.num_available == engine.loop.state.ledger.num_blocks == MODEL.num_blocks


def test_a_handover_that_forgets_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the law above: requests begin anew."""

    def forget(record: Record) -> Request:
        return replace(record.request, is_accepted=True)

    monkeypatch.setattr(regrouping, "_go_on", forget)
    monkeypatch.setattr(VirtualStages, "adopt", _compute_again)
    cluster, _ = run(1)
    assert count_wrong(cluster, make_requests(1)) > 0


def _compute_again(stages: VirtualStages, request: Request, blocks: Sequence[BlockId], num_computed: int) -> SeqId:
    stages.loop.state.ledger.free(blocks)
    return stages.submit(request)


class Scripted(ReliefRule):
    """Makes moves at given times, whatever the load."""

    def __init__(self, moves: dict[float, DropMoment]) -> None:
        super().__init__(QUICK, is_priced=False, most_stages=4)
        self._moves = moves

    def decide(self, load: ReliefLoad) -> DropMoment:
        is_due = [when for when in self._moves if when <= load.blocks.now and not load.blocks.is_changing]
        return self._moves.pop(is_due[0]) if is_due else DropMoment()


@pytest.mark.parametrize(("seed", "link"), [(12, FAST), (13, SLOW)])
def test_every_request_gets_its_tokens_across_a_merge_of_groups(seed: int, link: GroupLink) -> None:
    drop, merge = DropMoment(DropMove.DROP, need_blocks=100), DropMoment(DropMove.DROP, need_blocks=20)
    cluster = VirtualCluster(Environment())
    rule = Scripted({1.0: drop, 1.8: merge, 3.5: DropMoment(DropMove.RESTORE)})
    groups = Regrouping(cluster, MODEL.groups_in(cluster.environment), link, 4, rule)
    cluster.environment.schedule(0.0, groups.look)
    serve_cluster(cluster, make_requests(seed, 280))
    assert [(one.is_drop, len(one.instances)) for one in groups.transitions] == [
        (True, 2), (True, 2), (True, 4), *[(False, 1)] * 4,
    ]  # fmt: skip
    first, second, merged = groups.transitions[:3]
    assert merged.num_blocks_before == first.num_blocks + second.num_blocks < merged.num_blocks
    assert merged.kv_bytes > 0 and merged.whole_s > merged.usable_s
    assert count_wrong(cluster, make_requests(seed, 280)) == 0 and groups.num_moving == 0
    for engine in cluster.engines.values():
        engine.loop.check_integrity()
        assert engine.loop.state.ledger.num_available == engine.loop.state.ledger.num_blocks == MODEL.num_blocks


def test_the_same_seed_gives_the_same_trace() -> None:
    (one, moved), (other, moved_again) = run(5), run(5)
    assert moved == moved_again
    assert all(one.token_times_s(name) == other.token_times_s(name) for name in one.stories)
    assert run(6)[1] != moved


def test_kv_that_crosses_a_slow_link_is_whole_later() -> None:
    fast, slow = (next(one for one in run(7, link)[1] if one.is_drop) for link in (FAST, SLOW))
    assert fast.usable_s == slow.usable_s
    assert slow.whole_s - slow.usable_s == pytest.approx(10 * (fast.whole_s - fast.usable_s))


def all_at_once() -> Iterator[Request]:
    for request in make_requests(8, 30):
        yield replace(request, arrival_s=0.0)


@pytest.mark.parametrize(("num_stages", "near"), [(2, 1e-9), (3, 0.05)])
def test_a_pipeline_beside_other_events_is_the_pipeline_alone(num_stages: int, near: float) -> None:
    """With three stages it may plan a little sooner: it sees steps that end while its first stage computes."""
    cluster = VirtualCluster(Environment())
    stages = MODEL.make_stages(cluster.environment, num_stages, 100)
    alone = MODEL.make_stages(Environment(), num_stages, 100).loop
    for request in all_at_once():
        stages.loop.submit(request)
        alone.submit(request)
    stages.advance()
    cluster.environment.run()
    timer = StepTimer(MODEL.cost)
    expected = run_pipeline(alone, lambda plan: [timer.time_s(plan) / num_stages + MODEL.hop_s] * num_stages)
    assert cluster.environment.now == pytest.approx(expected.span_s, rel=near)
    assert stages.busy_s == pytest.approx(list(expected.busy_s), rel=near)


def test_one_stage_is_an_instance() -> None:
    cluster = VirtualCluster(Environment())
    cluster.join(MODEL.make_stages(cluster.environment, 1, MODEL.num_blocks))
    requests = make_requests(9, 60)
    serve_cluster(cluster, requests)
    link = Link(Tier.HOST, 1e9)
    timer = StepTimer(MODEL.cost)
    device = VirtualDevice(
        step_time_s=timer.time_s, num_blocks=MODEL.num_blocks, block_tokens=16, config=MODEL.config, link=link,
        num_swap_slots=0, caches_prefixes=False,
    )  # fmt: skip
    served = serve(requests, FcfsPolicy(), device)
    in_order = sorted(requests, key=lambda request: request.arrival_s)
    for request, life in zip(in_order, served.lifecycles, strict=True):
        assert cluster.token_times_s(request.request_id) == pytest.approx(life.token_times_s)


def test_requests_are_spread_over_instances_and_wait_while_there_is_none() -> None:
    cluster = VirtualCluster(Environment())
    early = make_requests(10, 12)
    for request in early:
        cluster.submit(request)
    loops: list[Loop] = []
    for _ in range(2):
        engine = MODEL.make_stages(cluster.environment, 1, MODEL.num_blocks)
        loops.append(engine.loop)
        cluster.join(engine)
    for request in make_requests(11, 24)[12:]:
        cluster.submit(replace(request, arrival_s=0.0))
    assert len(cluster.stories) == 24 and all(loop.num_submitted for loop in loops)
