"""The loop at depth 1: requests, refusals, plans and outputs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from floodplain.core.errors import InvariantError, QueueFull, RequestRefused
from floodplain.core.lifecycle import EventKind
from floodplain.core.plan import Chunk, Decision, Preemption, PreemptionMode, Reason, StepResult, TokenLogprobs, Wait
from floodplain.core.request import NO_GOALS, FinishReason, Goals, SeqId
from floodplain.policy.registry import POLICIES, make_policy
from floodplain.runtime.state import LoopConfig
from tests.support.driver import Choice, Driver, ScriptedPolicy, computed
from tests.support.loops import make_loop, make_request, next_token

# -- requests that never fit are refused at once, with the numbers ---------------------------------------------------


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "message"),
    [
        (0, 1, "the prompt is empty"),
        (4, 61, r"4 prompt tokens \+ max_tokens 61 are more than the 64 tokens of max_model_len"),
        (64, None, r"64 prompt tokens \+ max_tokens 1 are more than the 64 tokens of max_model_len"),
        (20, 13, r"33 tokens \(prompt 20 \+ output\) need 9 KV blocks, but the pool has 8"),
        (3, None, r"64 tokens \(prompt 3 \+ output\) need 16 KV blocks, but the pool has 8"),
    ],
)
def test_a_request_that_never_fits_is_refused_with_its_numbers(
    num_prompt: int, max_tokens: int | None, message: str
) -> None:
    loop = make_loop(num_blocks=8, block_tokens=4, max_model_len=64)
    with pytest.raises(RequestRefused, match=message) as problem:
        loop.submit(make_request("r", tuple(range(num_prompt)), max_tokens=max_tokens))
    assert "\n" not in str(problem.value)
    assert not loop.has_unfinished
    assert loop.next_plan(1.0) == Wait()


@pytest.mark.parametrize("name", POLICIES)
def test_a_goal_that_the_policy_would_ignore_is_refused(name: str) -> None:
    loop = make_loop(policy=make_policy(name), num_slots=16)
    hurried = replace(make_request("r", (1, 2)), goals=Goals(tpot_s=0.125))
    if name in ("paced", "timely"):
        assert loop.check(hurried) == loop.check(replace(hurried, goals=NO_GOALS))
        return
    with pytest.raises(RequestRefused, match=f"no goals are kept by {name}: leave tpot_goal_ms out"):
        loop.submit(hurried)


def test_goals_that_cannot_be_kept_without_swap_space_are_refused() -> None:
    loop = make_loop(policy=make_policy("paced"))
    with pytest.raises(RequestRefused, match="no goals are kept without swap space: leave ttft_goal_ms out") as caught:
        loop.submit(replace(make_request("r", (1, 2)), goals=Goals(ttft_s=0.125)))
    assert caught.value.field == "ttft_goal_ms"
    loop = make_loop(policy=make_policy("timely"))  # it chooses admissions without swap space, too
    assert loop.submit(replace(make_request("r", (1, 2)), goals=Goals(ttft_s=0.125))) == 0


def test_a_request_that_fills_the_pool_exactly_is_served() -> None:
    driver = Driver(make_loop(num_blocks=8, block_tokens=4, max_model_len=64))
    driver.submit(range(20), max_tokens=12, ignore_eos=True)
    driver.run()
    assert driver.finished == {0: FinishReason.LENGTH}


def test_without_max_tokens_a_request_runs_to_the_length_of_the_model() -> None:
    driver = Driver(make_loop(num_blocks=4, block_tokens=4, max_model_len=16))
    driver.submit(range(5), max_tokens=None, ignore_eos=True)
    driver.run()
    assert len(driver.outputs[SeqId(0)]) == 11


def test_a_view_has_the_step_of_the_last_completion() -> None:
    """It is the first step planned afterwards: there a policy can end a slice."""
    policy = ScriptedPolicy()
    driver = Driver(make_loop(policy=policy))
    driver.submit([1], max_tokens=2, ignore_eos=True)
    driver.submit([2], max_tokens=4, ignore_eos=True)
    driver.run()
    ended = [view.step for view in policy.views if view.completion_step == view.step]
    assert ended == [2]  # the second ends after step 3, and nothing is planned then
    assert policy.views[1].completion_step == -1


def test_a_full_queue_refuses_requests_until_one_has_started() -> None:
    driver = Driver(make_loop(max_waiting=1, max_num_seqs=1))
    driver.submit([1], max_tokens=2)  # may run next: it does not count as waiting
    driver.submit([2], max_tokens=2)
    with pytest.raises(QueueFull, match="1 requests are waiting already"):
        driver.submit([3], max_tokens=2)
    driver.step()
    driver.step()
    driver.submit([3], max_tokens=2)
    driver.run()
    assert len(driver.finished) == 3


def test_every_limit_is_at_least_one() -> None:
    for limit in ("max_model_len", "max_batched_tokens", "max_num_seqs", "max_waiting", "depth"):
        with pytest.raises(InvariantError, match=limit):
            LoopConfig(**{"max_model_len": 8, limit: 0})


# -- steps -----------------------------------------------------------------------------------------------------------


def test_the_executor_gets_a_request_once_and_each_new_block_once() -> None:
    driver = Driver(make_loop(block_tokens=4))
    driver.submit([1, 2, 3], max_tokens=6, ignore_eos=True)
    plans = driver.run()
    assert [chunk.request is not None for plan in plans for chunk in plan.prefills] == [True]
    assert [(table.start, len(table.blocks)) for plan in plans for table in plan.tables] == [(0, 1), (1, 1)]
    assert [plan.step_id for plan in plans] == list(range(6))


def test_steady_decoding_hands_out_the_same_tuple() -> None:
    driver = Driver(make_loop(block_tokens=16))
    driver.submit([1, 2, 3], max_tokens=8, ignore_eos=True)
    driver.submit([4, 5], max_tokens=8, ignore_eos=True)
    driver.step()
    plans = [driver.step() for _ in range(5)]
    assert all(plan.decodes is plans[0].decodes for plan in plans)


def test_what_is_released_is_reported_to_the_executor_once() -> None:
    driver = Driver(make_loop())
    first = driver.submit([1, 2], max_tokens=1)
    driver.step()
    second = driver.submit([3, 4], max_tokens=2, ignore_eos=True)
    assert driver.step().released == (first,)
    assert driver.step().released == ()
    assert driver.finished[second] is FinishReason.LENGTH


def test_a_preemption_in_a_step_without_work_is_in_the_next_plan() -> None:
    driver = Driver(make_loop(policy=(policy := ScriptedPolicy())))
    seq_id = driver.submit([1, 2], max_tokens=4, ignore_eos=True)
    driver.step()
    leave = Preemption(seq_id, PreemptionMode.RECOMPUTE, Reason.POOL_EXHAUSTED)
    policy.script.append(lambda view: Decision(preemptions=(leave,)))
    plan = driver.step()
    assert plan.prefills and plan.preemptions == (leave,)
    assert driver.step().preemptions == ()


def test_a_result_must_be_that_of_the_oldest_step() -> None:
    driver = Driver(make_loop())
    with pytest.raises(InvariantError, match="out of order"):
        driver.loop.complete(StepResult(0, []), 0.0)
    driver.submit([1, 2], max_tokens=2)
    driver.plan()
    with pytest.raises(InvariantError, match="out of order"):
        driver.loop.complete(StepResult(1, [5]), 0.0)


@pytest.mark.parametrize("tokens", [[], [1, 2]])
def test_a_result_must_have_one_token_for_each_sampled_sequence(tokens: list[int]) -> None:
    driver = Driver(make_loop())
    driver.submit([1, 2], max_tokens=2)
    driver.plan()
    with pytest.raises(InvariantError, match="tokens"):
        driver.loop.complete(StepResult(0, tokens), 0.0)


def test_an_answer_to_no_transfer_is_a_broken_invariant() -> None:
    with pytest.raises(InvariantError, match="not in flight"):
        make_loop().transfer_done(1, (), 0.0)


# -- how requests end ------------------------------------------------------------------------------------------------


def sampled_tokens(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tuple(tokens)))
    return tokens[len(prompt) :]


def test_a_stop_token_ends_a_request_and_is_its_last_token() -> None:
    prompt = [3, 1, 4]
    expected = sampled_tokens(prompt, 5)
    stop = next(token for token in expected[2:] if token not in expected[:2])
    driver = Driver(make_loop())
    seq_id = driver.submit(prompt, max_tokens=9, ignore_eos=True, stop_token_ids=(stop,))
    while seq_id not in driver.finished:
        driver.step()
    assert driver.finished[seq_id] is FinishReason.STOP
    assert driver.outputs[seq_id] == expected[: expected.index(stop) + 1]


def test_min_tokens_holds_a_stop_back() -> None:
    prompt = [3, 1, 4]
    expected = sampled_tokens(prompt, 6)
    driver = Driver(make_loop())
    seq_id = driver.submit(prompt, max_tokens=6, min_tokens=4, ignore_eos=True, stop_token_ids=tuple(set(expected)))
    while seq_id not in driver.finished:
        driver.step()
    assert driver.outputs[seq_id] == expected[:5]  # the first stop after min_tokens


def test_a_client_that_hangs_up_frees_its_blocks_at_once() -> None:
    driver = Driver(make_loop(num_blocks=8))
    waits = driver.submit([1, 2], max_tokens=3)
    assert driver.loop.finish(waits, FinishReason.ABORT, 1.0)
    runs = driver.submit([3, 4], max_tokens=30, ignore_eos=True)
    driver.step()
    assert driver.loop.finish(runs, FinishReason.ABORT, driver.now)
    assert driver.loop.state.ledger.num_available == 8
    assert not driver.loop.finish(runs, FinishReason.STOP, driver.now)
    assert not driver.loop.finish(SeqId(99), FinishReason.ABORT, driver.now)
    assert not driver.loop.has_unfinished
    assert driver.loop.counters.finished == {"stop": 0, "length": 0, "abort": 2}


def test_a_request_aborted_in_a_step_gets_nothing_and_frees_its_blocks() -> None:
    driver = Driver(make_loop(num_blocks=8))
    seq_id = driver.submit([3, 4], max_tokens=30, ignore_eos=True)
    driver.plan()
    driver.loop.finish(seq_id, FinishReason.ABORT, driver.now)
    assert driver.loop.state.ledger.num_available < 8
    outputs = driver.complete()
    assert (list(outputs.seq_ids), outputs.finished) == ([], {})
    assert driver.loop.counters.num_wasted_tokens == 1
    assert driver.loop.state.ledger.num_available == 8


def test_the_last_token_keeps_its_logprobs() -> None:
    driver = Driver(make_loop())
    seq_id = driver.submit([1, 2, 3], max_tokens=1, logprobs=0)
    driver.plan()
    result = replace(driver.pending[0], logprobs={seq_id: TokenLogprobs(-0.5)})
    outputs = driver.loop.complete(result, 2.0)
    assert outputs.finished == {seq_id: FinishReason.LENGTH}
    assert outputs.logprobs == {seq_id: TokenLogprobs(-0.5)}


def test_the_life_of_a_request_is_stamped_with_the_times_of_the_caller() -> None:
    loop = make_loop()
    seq_id = loop.submit(make_request("r", (1, 2), arrival_s=10.0, max_tokens=2, ignore_eos=True))
    lifecycle = loop.state.sequences[seq_id].lifecycle
    loop.next_plan(11.0)
    loop.complete(StepResult(0, [5]), 12.5)
    loop.next_plan(13.0)
    loop.complete(StepResult(1, [6]), 14.0)
    assert lifecycle.events == [
        (10.0, EventKind.ARRIVED),
        (11.0, EventKind.SCHEDULED),
        (14.0, EventKind.FINISHED),
    ]
    assert (lifecycle.ttft_s, lifecycle.tpot_s, lifecycle.queueing_delay_s) == (2.5, 1.5, 1.0)


# -- prefix cache ----------------------------------------------------------------------------------------------------

PROMPT = tuple(range(10, 21))  # 11 tokens: two full blocks of 4 and a rest


def test_a_prompt_that_was_seen_computes_only_its_rest() -> None:
    driver = Driver(make_loop(num_blocks=16))
    driver.submit(PROMPT, max_tokens=1)
    driver.run()
    second = driver.submit(PROMPT, max_tokens=1)
    plan = driver.step()
    assert [(chunk.start, chunk.token_ids) for chunk in plan.prefills] == [(8, PROMPT[8:])]
    assert driver.outputs[second] == driver.outputs[SeqId(0)]
    assert driver.loop.counters.num_cached_tokens == 8
    assert driver.loop.counters.num_queried_tokens == 22
    assert driver.loop.counters.num_prompt_tokens == 22


def test_a_hit_leaves_at_least_one_token_to_compute() -> None:
    driver = Driver(make_loop(num_blocks=16))
    for _ in range(2):
        driver.submit(PROMPT[:8], max_tokens=1)
        last = driver.step()
    assert computed(last) == {1: 4}
    assert driver.loop.counters.num_cached_tokens == 4


def test_a_prefix_is_shared_only_under_the_same_salt() -> None:
    driver = Driver(make_loop(num_blocks=16))
    for salt in ("one", "other", "one"):
        driver.submit_request(replace(make_request("r", PROMPT, max_tokens=1), cache_salt=salt))
        last = driver.step()
        assert len(last.prefills[0].token_ids) == (3 if driver.loop.counters.num_cached_tokens else 11)
    assert driver.loop.counters.num_cached_tokens == 8


def test_without_prefix_caching_nothing_is_ever_a_hit() -> None:
    """Blocks of ended and running requests are not shared: benchmarks turn the cache off for that."""
    driver = Driver(make_loop(num_blocks=32, caches_prefixes=False))
    driver.submit(PROMPT, max_tokens=1)
    driver.step()
    for _ in range(2):
        driver.submit(PROMPT, max_tokens=9, ignore_eos=True)
        driver.step()
    assert driver.loop.counters.num_cached_tokens == 0
    tables = driver.loop.state.block_tables()
    assert not set(tables[0]) & set(tables[1])
    driver.run()


# -- an impossible decision of a policy raises an error --------------------------------------------------------------


@pytest.mark.parametrize(
    "choice",
    [
        lambda view: Decision(decodes=(SeqId(0),)),
        lambda view: Decision(chunks=(Chunk(SeqId(0), 1),)),
        lambda view: Decision(admissions=(Chunk(SeqId(0), 0),)),
        lambda view: Decision(admissions=(Chunk(SeqId(0), 3),)),
        lambda view: Decision(admissions=(Chunk(SeqId(7), 1),)),
        lambda view: Decision(),
    ],
)
def test_a_decision_that_the_view_did_not_allow_is_a_broken_invariant(choice: Choice) -> None:
    driver = Driver(make_loop(policy=ScriptedPolicy([choice])))
    driver.submit([1, 2], max_tokens=2)
    with pytest.raises((InvariantError, KeyError)):
        driver.plan()


def test_a_decision_over_more_blocks_than_there_are_is_a_broken_invariant() -> None:
    driver = Driver(make_loop(num_blocks=2, policy=ScriptedPolicy([lambda v: Decision(admissions=greedy)])))
    greedy = tuple(Chunk(driver.submit(range(k, k + 7), max_tokens=1), 7) for k in (0, 10))
    with pytest.raises(InvariantError, match="needs 2 more blocks than there are"):
        driver.plan()
