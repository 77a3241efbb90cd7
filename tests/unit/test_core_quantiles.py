"""Quantiles against numpy's."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.quantiles import quantile


@given(
    st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=60), st.one_of(st.floats(0, 1), st.sampled_from([0.5, 0.99]))
)
def test_a_quantile_is_numpys_to_the_last_bit(values: list[float], part: float) -> None:
    assert quantile(values, part) == np.quantile(values, part)


def test_the_values_may_be_in_any_order_and_stay_in_it() -> None:
    values = [3.0, 1.0, 2.0, 10.0]
    assert quantile(values, 0.5) == 2.5 and values == [3.0, 1.0, 2.0, 10.0]
