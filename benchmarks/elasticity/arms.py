"""The servers of both arms: a lender beside a borrower, and the same two that know nothing of each other.

All run all the time, and only one pair has a load: so both arms meet the same machine, seconds apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from floodplain.demo.cluster import VerbProcess, split_cores
from floodplain.demo.leases import LENDER_POOL_BYTES, LendingScale, borrower_flags, lender_flags
from floodplain.demo.ways import HOST_LINK
from floodplain.engine.config import EngineConfig

NUM_RESIDENT = 12
MOST_LENT = str(LENDER_POOL_BYTES - 96 * 2**20)
"""What is left is more than the light load ever needs: nothing is recalled while it is measured."""
SCALE = LendingScale(
    lend_after_s=2.0, borrow_s=0.0, double_s=0.0, light_s=0.0, end_s=0.0,
    num_lender_users=0, num_borrower_users=36, num_resident=NUM_RESIDENT,
)  # fmt: skip
"""Sizes are the demo's; its times are not used here."""


@dataclass(frozen=True, slots=True)
class Arm:
    """Addresses of one pair of servers: the lender, whose own requests are measured, and the borrower.

    The name is ``peer`` or ``host``: where the borrower swaps to.
    """

    name: str
    lender: str
    borrower: str


class Servers:
    """Starts servers, each on its half of the cores; a context manager by ``running``."""

    def __init__(self, processes: ExitStack, folder: Path, base: EngineConfig) -> None:
        self._processes, self._folder, self._base = processes, folder, base
        self._near, self._far = split_cores()

    def start_coordinator(self) -> str:
        """Its address."""
        words = ["coordinator", "--port", "0", "--store", f"sqlite:///{self._folder / 'leases.db'}"]
        return str(self._start("coordinator", words, None).wait_ready()["url"])

    def start_peer(self, coordinator: str, scale: LendingScale = SCALE, lend: str = MOST_LENT) -> Arm:
        """A lender and a borrower."""
        lender, borrower = self.start_lender(coordinator, scale, lend), self.start_borrower(coordinator, scale)
        return Arm("peer", str(lender.wait_ready()["url"]), str(borrower.wait_ready()["url"]))

    def start_lender(self, coordinator: str, scale: LendingScale = SCALE, lend: str = MOST_LENT) -> VerbProcess:
        """One that lends as much as it can, or at most a size."""
        flags = ["--coordinator", coordinator, *lender_flags(self._base, scale), "--lend", lend]
        return self._serve("peer-lender", flags, self._near)

    def start_borrower(self, coordinator: str, scale: LendingScale = SCALE) -> VerbProcess:
        """One that borrows."""
        flags = ["--coordinator", coordinator, *borrower_flags(self._base, scale, NUM_RESIDENT)]
        return self._serve("peer-borrower", flags, self._far)

    def start_host(self) -> Arm:
        """The same without leases: the whole pool is the first one's, and the second one swaps to the host."""
        common = ["--dtype", self._base.dtype, "--max-model-len", str(self._base.max_model_len)]
        alone = [*common, "--kv-memory", str(LENDER_POOL_BYTES), "--swap", "none", "--policy", "fcfs"]
        swaps = [*common, "--kv-memory", str(self._base.kv_memory), "--swap", "host", "--hardware", HOST_LINK]
        lender, borrower = self._serve("host-lender", alone, self._near), self._serve("host-borrower", swaps, self._far)
        return Arm("host", str(lender.wait_ready()["url"]), str(borrower.wait_ready()["url"]))

    def _serve(self, name: str, flags: list[str], cores: list[int] | None) -> VerbProcess:
        return self._start(name, ["serve", self._base.model, "--port", "0", *flags], cores)

    def _start(self, name: str, words: list[str], cores: list[int] | None) -> VerbProcess:
        return self._processes.enter_context(VerbProcess(words, self._folder / f"{name}.log", cores))


@contextmanager
def running(folder: Path, base: EngineConfig) -> Iterator[Servers]:
    """Servers that end with the context."""
    with ExitStack() as processes:
        yield Servers(processes, folder, base)
