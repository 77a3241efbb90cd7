"""Link curves: laws of the time of a copy, the facts they were built from, and the common factor of emulation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.cost.link import LINKS, LinkCurve, common_scale

SIZES = st.integers(1, 2**36)
NAMES = st.sampled_from(sorted(LINKS))


@given(NAMES, SIZES, SIZES)
def test_a_larger_copy_takes_longer_and_is_not_slower_per_byte(name: str, one: int, other: int) -> None:
    curve = LINKS[name].outbound
    small, large = sorted((one, other))
    assert curve.time_s(small) <= curve.time_s(large)
    assert curve.bandwidth(small) <= curve.bandwidth(large) * (1 + 1e-9)


@given(NAMES, SIZES, SIZES)
def test_one_large_copy_beats_two_small_ones(name: str, one: int, other: int) -> None:
    curve = LINKS[name].inbound
    assert curve.time_s(one + other) <= (curve.time_s(one) + curve.time_s(other)) * (1 + 1e-9)


@given(NAMES, SIZES)
def test_no_copy_is_faster_than_the_peak(name: str, num_bytes: int) -> None:
    assert LINKS[name].outbound.bandwidth(num_bytes) <= LINKS[name].peak_bandwidth * (1 + 1e-9)


def test_curves_go_through_what_was_seen() -> None:
    nvlink3 = LINKS["nvlink3"].outbound
    assert nvlink3.bandwidth(4 * 2**20) == pytest.approx(50e9)
    assert nvlink3.bandwidth(64 * 2**20) == pytest.approx(200e9)
    assert nvlink3.peak_bandwidth == pytest.approx(250e9)  # 60 MiB more take 252 us more
    assert LINKS["pcie5"].outbound.bandwidth(512 * 2**20) == pytest.approx(55.06e9)


def test_the_fastest_emulated_link_has_half_of_the_machine_and_ratios_stay() -> None:
    pair = [LINKS["nvlink4"], LINKS["pcie5"]]
    scale = common_scale(pair, 4e9)
    assert scale * pair[0].peak_bandwidth == pytest.approx(2e9)
    large = 2**33
    ratio = pair[0].inbound.bandwidth(large) / pair[1].inbound.bandwidth(large)
    assert ratio == pytest.approx(396.4 / 55.43, rel=0.02)
    assert common_scale(pair, 1e13) == 1.0


@pytest.mark.parametrize(
    ("latency_s", "points"),
    [
        (0.0, ()),
        (-1e-6, ((1024, 1e9),)),
        (0.0, ((1024, 0.0),)),
        (0.0, ((2048, 1e9), (1024, 1e9))),
        (0.0, ((1024, 1e6), (2048, 1e9))),  # twice as much in less time
        (1.0, ((1024, 1e9),)),  # slower empty than full
    ],
)
def test_impossible_curves_are_refused(latency_s: float, points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(UserError, match="link"):
        LinkCurve(latency_s, points)
