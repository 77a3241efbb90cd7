"""Which instance gets a request: laws of freeness, and of the prefix as a tie-break."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from floodplain.policy.dispatch import NEARLY, InstanceView, choose_instance, freeness

views = st.builds(
    InstanceView,
    epoch=st.integers(1, 10**6),
    num_blocks=st.integers(1, 200),
    num_demanded_blocks=st.integers(0, 300),
    num_requests=st.integers(0, 40),
    num_known_blocks=st.integers(0, 20),
)
crowds = st.lists(views, min_size=1, max_size=6, unique_by=lambda view: view.epoch)


def chosen(crowd: list[InstanceView], num_needed: int = 1) -> InstanceView:
    epoch = choose_instance(crowd, num_needed)
    return next(view for view in crowd if view.epoch == epoch)


def without_prefixes(crowd: list[InstanceView]) -> list[InstanceView]:
    return [replace(view, num_known_blocks=0) for view in crowd]


@given(crowds, st.integers(1, 50))
def test_without_prefixes_the_freest_instance_is_chosen(crowd: list[InstanceView], num_needed: int) -> None:
    crowd = without_prefixes(crowd)
    assert freeness(chosen(crowd, num_needed)) == max(map(freeness, crowd))


@given(crowds, st.integers(1, 50), st.randoms())
def test_the_order_of_instances_changes_nothing(crowd: list[InstanceView], num_needed: int, dice: object) -> None:
    shuffled = list(crowd)
    dice.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose_instance(crowd, num_needed) == choose_instance(shuffled, num_needed)


@given(views, st.integers(1, 30))
def test_one_more_request_makes_no_instance_freer(view: InstanceView, num_blocks: int) -> None:
    after = replace(view, num_demanded_blocks=view.num_demanded_blocks + num_blocks, num_requests=view.num_requests + 1)
    assert freeness(after) <= freeness(view)


def test_divided_by_requests_a_deficit_would_hide_in_a_crowd() -> None:
    """Negative control: by the published quotient, an instance is freer the more requests wait there."""
    few = InstanceView(1, 100, 150, 10)
    many = InstanceView(2, 100, 160, 100)
    assert (100 - 160) / 100 > (100 - 150) / 10
    assert choose_instance([few, many], 1) == 1


@given(crowds, st.integers(1, 50))
def test_a_prefix_decides_only_between_near_equals_that_fit_the_request(
    crowd: list[InstanceView], num_needed: int
) -> None:
    best = chosen(without_prefixes(crowd), num_needed)
    one = chosen(crowd, num_needed)
    if one.epoch != best.epoch:
        assert freeness(one) >= NEARLY * freeness(best)
        assert one.num_known_blocks > 0 and one.num_free_blocks >= num_needed


def test_an_idle_instance_with_the_prefix_is_preferred_until_it_is_busy() -> None:
    idle = InstanceView(1, 100, 0, 0)
    assert choose_instance([idle, InstanceView(2, 100, 5, 1, num_known_blocks=4)], 6) == 2
    assert choose_instance([idle, InstanceView(2, 100, 10, 2, num_known_blocks=4)], 6) == 1


@given(crowds, st.integers(1, 50), st.data())
def test_choices_of_one_request_go_to_one_instance_however_busy(
    crowd: list[InstanceView], num_needed: int, data: st.DataObject
) -> None:
    holder = data.draw(st.sampled_from(crowd))
    others = [one for one in crowd if one is not holder]
    assert choose_instance([*others, replace(holder, num_choices=1)], num_needed) == holder.epoch


def test_ties_go_to_fewer_requests_then_to_the_first() -> None:
    assert choose_instance([InstanceView(2, 10, 0, 1), InstanceView(1, 10, 0, 1)], 1) == 1
    assert choose_instance([InstanceView(1, 10, 0, 1), InstanceView(2, 10, 0, 0)], 1) == 2
    assert choose_instance([], 1) is None
