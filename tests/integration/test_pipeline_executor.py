"""A leader and its stages over real links, in one process: tokens of one engine, busy times, and lost links."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import pytest

from floodplain.cluster.pipeline.device_link import Link
from floodplain.cluster.pipeline.stage import PipelineExecutor, StageWorker, make_engine, plan_limits
from floodplain.cluster.wire.plan_codec import PlanLimits
from floodplain.cluster.wire.stage_link import StageLink
from floodplain.core.errors import PeerLost
from floodplain.cost.pipeline import ChunkPrice, cost_by_shape
from floodplain.engine.shell import Engine
from floodplain.policy.microbatch import MicrobatchRule
from tests.integration.test_stage_runner import SHAPE, drain, one_engine, requests, stages_of
from tests.support.gloo_links import Forgetful, link_by_gloo
from tests.support.stage_links import KEY, MAX_DATA_BYTES, listen, open_link

NUM_STAGES = 3


@contextmanager
def pipeline(
    make_device_link: Callable[[StageLink, StageLink, PlanLimits], tuple[Link, Link]] | None = None,
) -> Iterator[tuple[Engine, list[StageWorker], list[tuple[Link, Link]]]]:
    """(the leader's engine, the other stages, the links in the order of their senders, the sender's end first)."""
    with ExitStack() as stack:
        stages = stack.enter_context(stages_of(NUM_STAGES))
        links: list[tuple[Link, Link]] = []
        limits = plan_limits(stages[0].parts, min(stage.num_blocks for stage in stages), 512)
        for place in range(NUM_STAGES):
            with listen() as listener:
                ends = asyncio.run(open_link(listener, replace(KEY, sender=place), MAX_DATA_BYTES))
            is_plain = make_device_link is None or place == NUM_STAGES - 1
            links.append(ends if is_plain or make_device_link is None else make_device_link(*ends, limits))
            for end in links[-1]:
                stack.callback(end.close)
        runners = [stage.make_runner(512) for stage in stages]
        workers = [
            StageWorker(runners[place], links[place - 1][1], links[place][0], limits) for place in range(1, NUM_STAGES)
        ]
        for worker in workers:
            worker.start()
            stack.callback(worker.close)
        rule = MicrobatchRule("even", ChunkPrice(cost_by_shape(SHAPE)), least_tokens=32)
        executor = PipelineExecutor(runners[0], links[0][0], links[-1][1], limits)
        ledger = stages[0].make_ledger(limits.num_blocks)
        engine = make_engine(stages[0].parts, ledger, executor, limits, NUM_STAGES, rule)
        stack.callback(engine.close)
        yield engine, workers, links


def test_three_stages_give_one_engines_tokens_and_report_busy_times() -> None:
    asked = requests(9)
    with pipeline() as (engine, workers, _):
        assert drain(engine, asked) == one_engine(asked)
        stats = engine.stats()
        assert stats.stage_busy_s.keys() == {"0", "1", "2"}
        assert all(0 < busy_s < stats.pipeline_s for busy_s in stats.stage_busy_s.values())
        assert [worker.failure for worker in workers] == [None, None]


def test_tokens_are_the_same_if_activations_go_from_device_to_device() -> None:
    """Over gloo here, over NCCL between GPUs. Negative control: activations of zeros change tokens."""
    asked = requests(5)
    with pipeline(link_by_gloo) as (engine, _, links):
        assert [end.carries_tensors for pair in links for end in pair] == [True] * 4 + [False] * 2
        assert drain(engine, asked) == one_engine(asked)
    with pipeline(partial(link_by_gloo, group_class=Forgetful)) as (engine, _, _):
        assert drain(engine, asked) != one_engine(asked)


@pytest.mark.parametrize("place", range(NUM_STAGES))
def test_a_lost_link_ends_all_stages_one_after_the_other(place: int) -> None:
    with pipeline() as (engine, workers, links):
        engine.add(requests(1)[0])
        engine.step()
        for end in links[place]:
            end.close()
        with pytest.raises(PeerLost):
            while engine.has_unfinished:
                engine.step()
        links[0][0].close()  # as the leader does when its life ends
        for worker in workers:
            worker.close()
            assert isinstance(worker.failure, PeerLost)
