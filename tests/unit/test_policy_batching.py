"""How a step's tokens are divided between prompts and streams."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.view import Prices, SequenceView, View
from floodplain.policy.paced import PacedPolicy
from floodplain.policy.settings import SharingSettings
from floodplain.policy.turn import UNPRICED_PREFILL, TokenBudget, prefill_cap
from tests.support.examples import examples
from tests.support.views import make_view, prompt, stream, waiting

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


def test_a_stream_that_comes_back_is_a_stream() -> None:
    """Its one token is in the step at any length of prompts, and it caps prompts like other streams."""
    assert chunks_of(make_view(prompt(0, 500), back(1), prices=PRICES)) == {0: 20, 1: 1}
    assert chunks_of(make_view(prompt(0, 500), back(1), max_batched_tokens=2)) == {0: 1, 1: 1}


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
