"""Max-min fair shares: what a key may claim does not depend on how much more others claim."""

from __future__ import annotations

from math import inf, isclose

from hypothesis import given
from hypothesis import strategies as st

from floodplain.policy.shares import Shares, level
from tests.support.views import make_view

CLAIMS = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.001, 2.0), min_size=1)
CAPACITY = st.floats(0.1, 2.0)


def share(claims: dict[str, float], work: dict[str, float] | None = None) -> Shares:
    shares = Shares(make_view(key_credits=work or dict.fromkeys(claims, 0.0)))
    for client, claim in claims.items():
        shares.add(client, claim, pending=0.0)
    return shares


@given(claims=CLAIMS, capacity=CAPACITY)
def test_claims_cut_to_the_level_fill_the_capacity(claims: dict[str, float], capacity: float) -> None:
    found = level(claims.values(), capacity)
    if found == inf:
        assert sum(claims.values()) <= capacity * (1 + 1e-9)
    else:
        assert isclose(sum(min(claim, found) for claim in claims.values()), capacity)


@given(claims=CLAIMS, capacity=CAPACITY, claim=st.floats(0.001, 1.0), more=st.floats(0, 100))
def test_a_key_within_its_equal_part_has_room_whatever_others_claim(
    claims: dict[str, float], capacity: float, claim: float, more: float
) -> None:
    own, *others = sorted(claims)
    has_room = share(claims).has_room(own, claim, capacity)
    if claims[own] + claim <= capacity / len(claims):
        assert has_room
    if claims[own] + claim > capacity:
        assert not has_room
    if not has_room:  # and has none either if others claim more
        assert not share({**claims, **{other: claims[other] + more for other in others}}).has_room(own, claim, capacity)


@given(claims=CLAIMS, capacity=CAPACITY, claim=st.floats(0.001, 1.0))
def test_beside_keys_that_would_claim_everything_the_equal_part_is_all(
    claims: dict[str, float], capacity: float, claim: float
) -> None:
    own, *others = sorted(claims)
    greedy = share({own: claims[own], **dict.fromkeys(others, capacity)})
    assert greedy.has_room(own, claim, capacity) is (claims[own] + claim <= capacity / len(claims))


@given(claims=CLAIMS, claim=st.floats(0.001, 1.0))
def test_one_key_alone_may_claim_what_is_left(claims: dict[str, float], claim: float) -> None:
    (own, taken), *_ = claims.items()
    assert share({own: taken}).has_room(own, claim, 1.0) is (taken + claim <= 1.0)
    assert not share({own: taken}).find_excess(0.5)
    assert not share({own: taken}).is_behind(own, 0.0)


@given(claims=CLAIMS, capacity=CAPACITY)
def test_without_the_excess_all_claims_fit(claims: dict[str, float], capacity: float) -> None:
    excess = share(claims).find_excess(capacity)
    if len(claims) > 1:
        kept = {client: claim - excess.get(client, 0.0) for client, claim in claims.items()}
        assert sum(kept.values()) <= capacity * (1 + 1e-9)
        least_cut = min((kept[client] for client in excess), default=inf)
        assert all(kept[client] <= least_cut * (1 + 1e-9) for client in claims)


def test_a_key_is_behind_if_another_was_served_more_than_it_will_have_been() -> None:
    shares = share({"a": 0.1, "b": 0.2}, {"a": 100.0, "b": 300.0})
    shares.add("a", 0.0, pending=150.0)
    assert shares.is_behind("a", 50.0) and not shares.is_behind("a", 51.0)
    assert not shares.is_behind("b", 0.0)
