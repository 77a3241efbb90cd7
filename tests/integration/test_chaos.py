"""Ten seeded faults under load, in real processes: no wrong token, no leaked byte, memory is lent again.

``make chaos`` plays a hundred faults or more; its last result is in tests/chaos/result.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.faults import FAULTS

pytestmark = pytest.mark.slow

SEED = 4


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with closing(Cluster(tmp_path, SEED)) as cluster:
        yield cluster


def test_ten_faults(cluster: Cluster) -> None:
    random = Random(SEED)
    cluster.wait_for_calm()
    for fault in random.sample(FAULTS, 10):
        fault(cluster, random)
        cluster.wait_for_calm()
    for role in cluster.engines:
        cluster.wait_checked(role, 50)
    cluster.finish()
    assert cluster.totals["consumer wrong"] == cluster.totals["producer wrong"] == 0
    assert cluster.totals["consumer num_granted"] > 8
