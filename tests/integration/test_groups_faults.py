"""Faults in states of a group, in real processes under streaming clients: no wrong token, no hung stream, no lost page.

``make chaos`` plays each fault in each state; its last result is in tests/chaos/groups.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from random import Random

import pytest

from floodplain.core.groups import GroupState as S
from tests.chaos.group_cluster import ENGINE, MODEL, NUM_STREAMS, GroupCluster
from tests.chaos.group_faults import play
from tests.chaos.group_load import Load, known_requests
from tests.chaos.group_scene import Scene, Story
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SEED = 1
STORIES = [
    Story("hang_up", S.RETURNING),  # ended the router once
    Story("kill_other", S.RETURNING),  # hung all streams once
    Story("ask_again", S.FILLING),
    Story("hang_up", S.EXCHANGING),
    Story("cut_backstop", S.SOLO),
    Story("damage_parameters_at_source", S.PIPELINED),
    Story("stop_leader", S.SHRINKING),
    Story("kill_leader", S.EXCHANGING),
    Story("damage_kv", S.PIPELINED),
    Story("kill_other", S.PREPARING),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GroupCluster]:
    known = known_requests(MODEL, ENGINE, SEED)
    with closing(GroupCluster(tmp_path_factory.mktemp("groups"), 2, known)) as cluster:
        cluster.start()
        yield cluster


def test_ten_faults(cluster: GroupCluster) -> None:
    for number, story in enumerate(STORIES):
        play(cluster, story, Random(f"{SEED} {number}"))
    cluster.wait_for(lambda: cluster.load.num_checked > 10, "no request ends")
    assert not cluster.load.wrong and cluster.load.num_hung_up > 0


def test_wrong_tokens_are_seen_if_chunks_are_not_verified(cluster: GroupCluster) -> None:
    cluster.wait_for_calm()
    cluster.blind()
    cluster.damage("kv")
    for number in range(10):
        scene = Scene(cluster, Story("damage_kv", S.PIPELINED), Random(number))
        scene.ask_drop()
        scene.wait_entered(S.PIPELINED)  # or a wrong token is seen before
        scene.ask_restore().result()
        wait_until(lambda: cluster.load.wrong or cluster.is_solo())
        _wait_until_requests_end(cluster.load)
        if cluster.load.wrong:
            break
    assert cluster.load.wrong and all("are right" in line for line in cluster.load.wrong)


def _wait_until_requests_end(load: Load) -> None:
    """Wait until a wrong token is seen, or a request has ended on each stream: tokens are compared at the end."""
    before = load.num_checked
    wait_until(lambda: load.wrong or load.num_checked >= before + NUM_STREAMS)
