"""``floodplain place`` as a command: what it prints and writes, and with what status it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from floodplain.cli.main import main
from floodplain.observe.placement import MAX_ROWS, draw_placement
from floodplain.observe.plots import to_svg
from floodplain.planner.inputs import read_cluster
from floodplain.planner.placement import to_document
from floodplain.planner.placer import place
from tests.support.coordinator_processes import run
from tests.support.refusals import Refuse

pytestmark = pytest.mark.slow

CLUSTER = """
servers:
  - {name: h100, count: 2, gpus: 4, memory: 80GB, link: 450GB}
models:
  - {name: yi-34b, tensor_parallel: 2, needs: 20GB, count: 2}
  - {name: sd-3, lends: 30GB, count: 2}
  - {name: audiogen, lends: 10GB}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


def test_the_table_shows_servers_consumers_and_the_proof(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "placement.svg"
    assert main(["place", str(cluster), "--plot", str(picture)]) == 0
    printed, told = capsys.readouterr()
    assert f"floodplain: the picture is in {picture}\n" in told
    rows = [line.split() for line in printed.splitlines()]
    held = sorted(row[4:] for row in rows if row[:1] == ["1"])
    assert held == [["1", "audiogen,", "1", "sd-3,", "1", "yi-34b"], ["1", "sd-3,", "1", "yi-34b"]]
    assert ["yi-34b", "4", "3", "80", "50"] in rows
    assert "matched: 50 of 80 GB needed, in 3 pairs" in printed
    assert "proven optimal" in printed and "moves" not in printed


def test_what_is_printed_as_json_is_what_is_written(cluster: Path, tmp_path: Path) -> None:
    """Runs a process: the solver's banner on standard output would not be JSON."""
    out, picture = tmp_path / "new" / "placement.json", tmp_path / "placement.png"
    done = run("place", str(cluster), "--out", str(out), "--plot", str(picture), "--format", "json", "-q")
    assert done.returncode == 0 and not done.stderr, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads(out.read_text())
    assert document["gap"] == 0 and document["objective_bytes"] == document["bound_bytes"]
    assert {row["device"]: row["gets_bytes"] for row in document["consumers"]}.keys() >= {
        pair["consumer"] for pair in document["pairs"]
    }
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_placement_is_kept_when_it_is_the_current_one(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "now.json"
    assert main(["place", str(cluster), "--out", str(out)]) == 0
    capsys.readouterr()
    cluster.write_text(CLUSTER + "current: now.json\n")
    assert main(["place", str(cluster), "--format", "json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["num_moves"] == 0 and again["servers"] == json.loads(out.read_text())["servers"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--gap", "-1"], "--gap must be between 0 and 10, not -1.0"),
        (["--time-limit", "0"], "--time-limit must be above 0 and at most 86400 seconds, not 0.0"),
        (["--plot", "x.txt"], "--plot x.txt must end in one of .png, .svg, .pdf"),
    ],
)
def test_flags_out_of_range_are_refused(cluster: Path, flags: list[str], told: str, refuse: Refuse) -> None:
    assert refuse("place", str(cluster), *flags) == told


def test_a_cluster_without_a_placement_is_refused_in_one_line(cluster: Path, refuse: Refuse) -> None:
    cluster.write_text(CLUSTER.replace("count: 2}\n  - {name: audiogen", "count: 9}\n  - {name: audiogen"))
    told = refuse("place", str(cluster))
    assert told == "there is no placement: 9 GPUs are needed, and the servers have 8: sd-3 (9 x 1 GPUs)"


def test_the_picture_has_a_cell_for_each_gpu_and_an_arc_for_each_pair(cluster: Path) -> None:
    from matplotlib.patches import FancyArrowPatch

    loaded = read_cluster(cluster)
    document = to_document(loaded, place(loaded))
    (panel,) = draw_placement(document).axes
    assert sum(isinstance(patch, FancyArrowPatch) for patch in panel.patches) == len(document["pairs"]) == 3
    texts = [text.get_text() for text in panel.texts]
    assert sum(text.startswith("yi-34b\n-20") for text in texts) == 4
    assert [label.get_text() for label in panel.get_yticklabels()] == ["h100-0", "h100-1"]
    assert to_svg(draw_placement(document)) == to_svg(draw_placement(document))


def test_arrows_stay_within_the_picture(cluster: Path) -> None:
    """Two GPUs have wide cells, and so a long way between them."""
    from matplotlib.patches import FancyArrowPatch

    cluster.write_text(
        "servers: [{name: a, gpus: 2, memory: 80GB}]\nmodels: [{name: b, lends: 1GB}, {name: c, needs: 1GB}]\n"
    )
    loaded = read_cluster(cluster)
    figure = draw_placement(to_document(loaded, place(loaded)))
    figure.draw_without_rendering()
    (panel,) = figure.axes
    arrows = [patch for patch in panel.patches if isinstance(patch, FancyArrowPatch)]
    assert len(arrows) == 1
    box = arrows[0].get_window_extent()
    assert panel.bbox.y0 <= box.y0 < box.y1 <= panel.bbox.y1


def test_the_picture_of_a_large_cluster_is_titled_as_partial(cluster: Path) -> None:
    cluster.write_text(CLUSTER.replace("count: 2, gpus", f"count: {MAX_ROWS + 1}, gpus"))
    loaded = read_cluster(cluster)
    figure = draw_placement(to_document(loaded, place(loaded)))
    assert f"the first {MAX_ROWS} of {MAX_ROWS + 1} servers" in [text.get_text() for text in figure.texts]
