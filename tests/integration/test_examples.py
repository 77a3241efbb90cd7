"""Examples explain themselves; in that of elastic tensors training gives the same loss while their memory moves."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from floodplain.lending.elastic import PageMoves
from floodplain.lending.membership import Membership
from floodplain.memory.peer.memory import HostPeerMemory
from tests.support.lease_client import Clock, Coordinator, InProcessClient, Producer

FOLDER = Path(__file__).parents[2] / "examples"
PROGRAMS = [path for path in sorted(FOLDER.rglob("*.py")) if 'if __name__ == "__main__":' in path.read_text()]


@pytest.fixture
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("elastic_tensors", FOLDER / "elastic_tensors.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(FOLDER)))
@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("--nonsense", 2)])
def test_examples_answer_help_and_refuse_unknown_arguments(
    path: Path, argument: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), argument])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(path), run_name="__main__")
    out, err = capsys.readouterr()
    assert caught.value.code == status and (out or err).startswith("usage: ")


def test_an_address_that_is_none_is_refused_in_one_line(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["elastic_tensors.py", "nonsense"])
    with pytest.raises(SystemExit, match=r"^elastic_tensors.py: [^\n]*'nonsense' is no address[^\n]*$"):
        example.main()


def test_momentum_may_come_and_go_and_the_loss_is_the_same(example: ModuleType, tmp_path: Path) -> None:
    alone = example.train(Membership("alone", "alone"), HostPeerMemory(tmp_path), 60, report=lambda moves: None)
    coordinator = Coordinator(Clock())
    producer = Producer(coordinator, "p", 4, tmp_path)
    client = InProcessClient(coordinator)
    moved: list[PageMoves] = []

    def neighbours_live(moves: PageMoves) -> None:
        """The neighbour lends, recalls, and lends again, every ten steps."""
        moved.append(moves)
        producer.lend(4 if len(moved) // 10 % 2 else 0)
        producer.beat()
        client.beat()

    assert example.train(client, HostPeerMemory(tmp_path), 60, neighbours_live) == alone
    num_bytes = 4 * (32 * 512 + 512 + 512 + 1)
    assert sum(moves.to_peer_bytes for moves in moved) == 3 * num_bytes
    assert sum(moves.to_host_bytes for moves in moved) == 2 * num_bytes
    assert producer.num_foreign_pages == 0
    producer.device.close()
