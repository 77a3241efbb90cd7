"""The example of 1,000 GPUs in a reduced size: all of its parts run, and equal seeds give equal results."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.simulate.planning.run import main as plan
from floodplain.cli.main import main

CLUSTER = """
servers: [{name: h, count: 2, gpus: 4, memory: 80GB, link: 450GB}]
models: [{name: chat, count: 4, lends: 20GB}, {name: code, count: 4, needs: 20GB}]
"""


@pytest.mark.slow
def test_the_example_answers_all_its_questions(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    placement = tmp_path / "placement.json"
    assert main(["place", str(tmp_path / "cluster.yaml"), "--out", str(placement), "-q"]) == 0
    flags = [str(placement), "--strata", "1", "--window", "2", "--slots", "8"]
    first, again = (plan(flags) for _ in range(2))
    assert {key: first[key] for key in ("estimate", "leases", "windows")} == {
        key: again[key] for key in ("estimate", "leases", "windows")
    }
    lent = first["leases"]["bytes"]
    assert lent["granted"] == sum(lent.get(name, 0) for name in ("recalled", "returned", "lost", "live")) > 0
    assert all(0 <= share <= 1 for share, _ in first["estimate"]["kept"].values())
    assert first["leases"]["messages_per_s"]["operations_max"] > 0
