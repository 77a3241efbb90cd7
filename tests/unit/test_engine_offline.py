"""Reports of a run: the difference of two snapshots, and the links that it used."""

from __future__ import annotations

from dataclasses import replace

from floodplain.bench.offline import hardware_report, report_between
from floodplain.engine.outputs import EngineStats
from floodplain.observe.result import SwapReport, TierTraffic

BEFORE = EngineStats(
    preemptions={"swap": 1},
    swap_bytes={("out", "host"): 10, ("in", "host"): 4, ("out", "peer"): 1, ("in", "peer"): 1},
    backup_bytes=3,
    swap_stall_s=0.5,
    failed_transfers={"not_copied": 1, "digest_mismatch": 0},
)
AFTER = replace(
    BEFORE,
    preemptions={"swap": 4},
    swap_bytes={("out", "host"): 60, ("in", "host"): 24, ("out", "peer"): 3, ("in", "peer"): 1},
    backup_bytes=23,
    swap_stall_s=0.75,
    failed_transfers={"not_copied": 1, "digest_mismatch": 2},
)


def test_a_swap_report_is_the_difference_of_two_snapshots() -> None:
    report = report_between(BEFORE, AFTER)
    assert report.preemptions == 3
    assert report.swap == SwapReport(
        out_bytes=32,
        in_bytes=20,
        backup_bytes=20,
        stall_s=0.25,
        by_tier={"host": TierTraffic(50, 20), "peer": TierTraffic(2, 0)},
        failed_transfers={"not_copied": 0, "digest_mismatch": 2},
    )
    traffic = report.swap.by_tier.values()
    assert report.swap.out_bytes + report.swap.backup_bytes == sum(tier.out_bytes for tier in traffic)


def test_without_swap_space_the_report_names_every_tier_all_the_same() -> None:
    by_tier = {"peer": TierTraffic(0, 0), "host": TierTraffic(0, 0)}
    assert report_between(EngineStats(), EngineStats()).swap == SwapReport(by_tier=by_tier)


def test_hardware_is_emulated_if_a_link_is() -> None:
    real = {"tier": "host", "name": "measured", "emulated": False, "bandwidth": 3e9}
    emulated = {"tier": "host", "name": "emulated-pcie4", "emulated": True, "bandwidth": 1e8, "slowdown": 250.0}
    plain, with_real, with_emulated = (hardware_report("cpu", links) for links in ((), (real,), (emulated,)))
    assert (plain.emulated, with_real.emulated, with_emulated.emulated) == (False, False, True)
    assert plain.name == with_real.name
    assert with_emulated.name == f"emulated-pcie4 on {plain.name}"
    assert with_emulated.links == (emulated,)
