"""How a ranking is fitted into memory and into a step's tokens; the ranking is that of ``fair``, then of ``paced``."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.hashing import BlockKey
from floodplain.core.plan import Decision, Reason
from floodplain.core.view import Prices, SequenceView, View
from floodplain.policy.fair import FairPolicy
from floodplain.policy.paced import PacedPolicy
from floodplain.policy.settings import SharingSettings
from floodplain.policy.turn import UNPRICED_PREFILL, TokenBudget, prefill_cap
from tests.support.examples import examples
from tests.support.views import host, loading, make_view, prompt, stream, swapped, waiting


def decide(*rows: SequenceView, **fields: object) -> Decision:
    return FairPolicy(SharingSettings(slice_steps=4)).decide(make_view(*rows, **fields), 0.0, Random(0))


def came(decision: Decision) -> list[int]:
    return [order.seq_id for order in (*decision.resumptions, *decision.admissions)]


def left(decision: Decision) -> list[int]:
    return [order.seq_id for order in decision.preemptions]


def test_an_admitted_request_must_have_room_for_a_slice() -> None:
    assert came(decide(waiting(5, 8), num_available_blocks=3)) == [5]
    assert came(decide(waiting(5, 8), num_available_blocks=2)) == []


def test_blocks_that_loading_requests_still_need_are_kept_for_them() -> None:
    """30 tokens and a slice are nine blocks, of which it has three."""
    assert came(decide(loading(0, num_tokens=30), waiting(5, 8), num_available_blocks=9)) == [5]
    assert came(decide(loading(0, num_tokens=30), waiting(5, 8), num_available_blocks=8)) == []


def test_nor_what_residents_will_need() -> None:
    resident = stream(0, block_due_step=103, entered_step=99)
    assert came(decide(resident, waiting(5, 8), num_available_blocks=4)) == [5]
    assert came(decide(resident, waiting(5, 8), num_available_blocks=3)) == []


def test_no_victim_is_chosen_for_a_resident_if_that_is_not_enough() -> None:
    """The chunk needs eight blocks, two victims free three each: the blocks that they would need do not count."""
    victims = [stream(number, block_due_step=101) for number in (1, 2)]
    short = decide(prompt(0, 40, 8), *victims, num_available_blocks=0)
    assert left(short) == [0]  # it cannot stay: no block would ever be free for it
    assert left(decide(prompt(0, 32, 8), *victims, num_available_blocks=0)) == [2, 1]


def test_without_a_refill_room_is_made_for_one_after_the_other() -> None:
    """Copies spread out; the second request's victim computes until then."""
    residents = [stream(number, block_due_step=200, num_tokens=20) for number in (0, 1)]
    decision = decide(*residents, swapped(2, num_tokens=9), swapped(3, num_tokens=9), num_available_blocks=1)
    assert left(decision) == [1]
    assert came(decision) == []
    assert decision.decodes == (0,)


def test_a_prefix_that_two_swapped_requests_share_is_swapped_in_once() -> None:
    """The second request resumes when the blocks are loaded, and shares them: it needs less room."""
    key, other = BlockKey(b"shared"), BlockKey(b"not")
    assert came(decide(swapped(0, next_copy=key), swapped(1, next_copy=key), swapped(2, next_copy=other))) == [0, 2]
    assert came(decide(swapped(0, next_copy=key, is_arriving=True), swapped(2, next_copy=other))) == [2]


def test_room_is_kept_for_a_request_that_waits_for_anothers_copy() -> None:
    """Four blocks for it, and three for the request below."""
    rows = swapped(0, next_copy=BlockKey(b"shared"), is_arriving=True), waiting(5, 8, credit=9.0)
    assert came(decide(*rows, num_available_blocks=7)) == [5]
    assert came(decide(*rows, num_available_blocks=6)) == []


# -- slots -----------------------------------------------------------------------------------------------------------

VETERAN = stream(
    1, num_tokens=48, num_scheduled=47, num_blocks=12, exclusive_blocks=12, num_backed_blocks=11, credit=1e2
)
RETURNING = waiting(2, 30, num_backed_blocks=6, num_restorable_tokens=24, credit=5.0)


def with_slots(num_free: int, *rows: SequenceView, num_blocks: int = 3) -> Decision:
    return decide(*rows, num_available_blocks=num_blocks, tiers=(host(num_free_slots=num_free),))


def test_a_prefix_is_not_fetched_from_slots_that_a_victim_needs() -> None:
    """Six slots hold the idle prefix of a waiting request; the veteran's tail needs one of them."""
    decision = with_slots(6, VETERAN, swapped(0), RETURNING)
    assert left(decision) == [1]
    assert [order.seq_id for order in decision.resumptions] == [0]
    assert [chunk.seq_id for chunk in decision.admissions] == [2]  # it computes its prompt instead
    enough = with_slots(7, VETERAN, swapped(0), RETURNING)
    assert [order.seq_id for order in enough.resumptions] == [0, 2]


def test_newcomers_wait_for_slots_while_those_in_swap_space_take_turns() -> None:
    """The veteran cannot be swapped out for the newcomer; the swapped request has room without that."""
    large, small = waiting(3, 20, credit=0.0), swapped(4, num_tokens=5, num_backed_blocks=2, credit=50.0)
    decision = with_slots(0, VETERAN, large, waiting(5, 4, credit=1.0), small, num_blocks=4)
    assert (left(decision), came(decision)) == ([], [4])
    assert decision.reason is Reason.SWAP_FULL
    assert sorted(came(with_slots(1, VETERAN, large, small, num_blocks=4))) == [3, 4]


def test_swapped_requests_wait_in_their_order() -> None:
    assert came(with_slots(0, VETERAN, swapped(3), swapped(4, num_tokens=5, num_backed_blocks=2, credit=50.0))) == []


# -- a step's tokens, divided between prompts and streams --------------------------------------------------------------


PRICES = Prices(step_s=0.02, prefill_token_s=0.001)


def back(number: int, **fields: object) -> SequenceView:
    """A stream that was just swapped in: one token to compute, as a chunk."""
    values: dict[str, object] = {"num_prompt": 8, "last_token_s": 0.0} | fields
    return prompt(number, 12, 11, **values)


def chunks_of(view: View) -> dict[int, int]:
    """Tokens of prompts and of swapped-in streams, by sequence."""
    policy = PacedPolicy(SharingSettings())
    decision = policy.decide(view, 1.0, None)  # type: ignore[arg-type]
    return {chunk.seq_id: chunk.num_tokens for chunk in (*decision.chunks, *decision.admissions)}


def test_half_of_a_steps_time_is_as_long_as_the_decodes_take() -> None:
    assert prefill_cap(make_view(prices=PRICES), 0.5) == 20
    assert prefill_cap(make_view(prices=PRICES), 0.75) == 60
    assert prefill_cap(make_view(prices=PRICES), 0.2) == 5


def test_without_a_share_prompts_get_what_streams_leave() -> None:
    view = make_view(stream(0), stream(1), prices=PRICES, max_batched_tokens=100)
    assert TokenBudget(view, 0.5).prefill_for(1000) == 20
    assert TokenBudget(view, None).prefill_for(1000) == 98


def test_a_prompt_gets_at_least_a_block() -> None:
    assert prefill_cap(make_view(prices=Prices(0.001, 0.5)), 0.5) == 4


def test_while_prices_are_unknown_a_constant_must_do() -> None:
    for prices in (Prices(), Prices(step_s=0.02), Prices(prefill_token_s=0.001)):
        assert prefill_cap(make_view(prices=prices), 0.5) == UNPRICED_PREFILL


def test_with_no_stream_in_the_step_prompts_get_everything() -> None:
    assert TokenBudget(make_view(prompt(0), prices=PRICES), 0.5).prefill_for(1000) == 64
    assert TokenBudget(make_view(prompt(0), stream(1), prices=PRICES), 0.5).prefill_for(1000) == 20


def test_streams_keep_their_tokens_when_the_step_is_small() -> None:
    view = make_view(*(stream(number) for number in range(6)), prompt(6), max_batched_tokens=8)
    budget = TokenBudget(view, 0.5)
    assert budget.take_prefill(30) == 2
    for _ in range(6):
        budget.take_decode()
    assert budget.num_left == 0


def test_a_stream_whose_last_token_is_outstanding_takes_no_place() -> None:
    view = make_view(stream(0, end_step=100), prompt(1), max_batched_tokens=1)
    assert TokenBudget(view, 0.5).prefill_for(30) == 1


def test_prompts_that_are_there_go_before_those_that_come() -> None:
    """By arrival: otherwise each newcomer's first chunk would delay all earlier first tokens."""
    assert chunks_of(make_view(prompt(0, 100, 8), waiting(1, 100), max_batched_tokens=50)) == {0: 50}
    assert chunks_of(make_view(prompt(0, 30, 8), waiting(1, 100), max_batched_tokens=50)) == {0: 22, 1: 28}
    assert chunks_of(make_view(prompt(2, 100, 8), waiting(1, 30), max_batched_tokens=50)) == {1: 30, 2: 20}


ROWS = st.lists(st.sampled_from(["stream", "back", "prompt", "waiting"]), min_size=1, max_size=12)


@settings(max_examples=examples(50))
@given(ROWS, st.integers(1, 40), st.booleans())
def test_no_step_is_too_large_and_no_stream_loses_its_place(kinds: list[str], limit: int, is_priced: bool) -> None:
    makers = {"stream": stream, "back": back, "prompt": prompt, "waiting": waiting}
    rows = [makers[kind](number) for number, kind in enumerate(kinds)]
    view = make_view(*rows, max_batched_tokens=limit, prices=PRICES if is_priced else Prices())
    policy = PacedPolicy(SharingSettings())
    decision = policy.decide(view, 1.0, None)  # type: ignore[arg-type]
    chunks = {chunk.seq_id: chunk.num_tokens for chunk in (*decision.chunks, *decision.admissions)}
    assert len(decision.decodes) + sum(chunks.values()) <= limit
    assert all(num_tokens > 0 for num_tokens in chunks.values())
    num_streams = kinds.count("stream") + kinds.count("back")
    served = len(decision.decodes) + sum(kinds[seq_id] == "back" for seq_id in chunks)
    assert served == min(limit, num_streams)
    num_prefill = sum(num for seq_id, num in chunks.items() if kinds[seq_id] in ("prompt", "waiting"))
    assert num_prefill <= (prefill_cap(view, 0.5) if num_streams else limit)
