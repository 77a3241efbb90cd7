"""The choices of a request share one account and one place, from the first one's arrival to the last one's end."""

from __future__ import annotations

from dataclasses import replace

from floodplain.core.request import FinishReason, Request, SeqId
from floodplain.core.sequence import Sequence
from floodplain.policy.fair import FairPolicy
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from tests.support.bursts import Machine
from tests.support.driver import Driver
from tests.support.loops import make_request


def make_driver(policy: str = "fair", **settings: object) -> Driver:
    sharing = SharingSettings(**settings)  # type: ignore[arg-type]
    return Driver(Machine(num_blocks=200, caches_prefixes=False).make_loop(make_policy(policy, sharing)))


def ask(n: int = 1, arrival_s: float = 0.0, client: str = "", first: int = 0) -> Request:
    prompt = tuple(range(first, first + 6))
    request = make_request("r", prompt, arrival_s, max_tokens=60, ignore_eos=True)
    return replace(request, params=replace(request.params, n=n), client=client)


def seq(driver: Driver, seq_id: SeqId) -> Sequence:
    return driver.loop.state.sequences[seq_id]


def steps(driver: Driver, num_steps: int) -> None:
    for _ in range(num_steps):
        driver.step()


def test_choices_have_one_group_and_a_request_of_one_has_none() -> None:
    assert [one.choice_group for one in ask(3).choices(7)] == [7, 7, 7]
    assert [one.choice_group for one in ask().choices(7)] == [0]


def test_a_further_choice_joins_the_account_and_place_of_its_request() -> None:
    driver = make_driver()
    first, second = ask(2).choices(1)
    old = driver.submit_request(ask(first=50))
    steps(driver, 3)
    one = driver.submit_request(first)
    steps(driver, 2)
    two, other = driver.submit_request(second), driver.submit_request(ask(arrival_s=9.0, first=90))
    assert seq(driver, one).account is seq(driver, two).account is not seq(driver, other).account
    assert seq(driver, one).account.credit == 3 and seq(driver, other).account.credit == 2 + 3
    driver.plan()
    rows = {row.seq_id: row for row in driver.loop._views.build(9, []).running}
    assert [rows[each].parent for each in (old, one, two, other)] == [old, one, one, other]
    assert rows[two].order_key[:2] == rows[one].order_key[:2]


def test_the_output_of_an_ended_choice_stays_with_the_others() -> None:
    driver = make_driver()
    ids = [driver.submit_request(one) for one in ask(3).choices(1)]
    steps(driver, 5)
    account = seq(driver, ids[0]).account
    work = account.work
    assert work == sum(len(driver.outputs[each]) for each in ids) > 0
    driver.loop._views.build(driver.loop.state.counters.num_steps, [])  # then only what the end changes is new
    driver.loop.finish(ids[0], FinishReason.STOP, driver.tick())
    assert account.work == work
    rows = driver.loop._views.build(driver.loop.state.counters.num_steps, []).running
    assert {(row.parent, row.num_ended_tokens) for row in rows} == {(ids[0], len(driver.outputs[ids[0]]))}


def test_a_newcomer_starts_at_the_work_of_requests_not_of_choices() -> None:
    driver = make_driver()
    for one in ask(4).choices(1):
        driver.submit_request(one)
    steps(driver, 6)
    newcomer = driver.submit_request(ask(first=70))
    choices = [each for each in driver.outputs if each != newcomer]
    assert seq(driver, newcomer).account.credit == sum(len(driver.outputs[each]) for each in choices)


def test_a_group_ends_with_its_last_choice() -> None:
    driver = make_driver()
    ids = [driver.submit_request(one) for one in ask(2).choices(1)]
    for each in ids:
        driver.loop.finish(each, FinishReason.ABORT, driver.tick())
    again = driver.submit_request(ask(2).choices(1)[0])
    assert seq(driver, again).account.parent == again
    assert len(driver.loop.state._shared_accounts) == 1


def test_choices_take_one_place_in_the_line_of_keys() -> None:
    driver = make_driver(fair_by="key")
    for one in ask(4, client="a").choices(1):
        driver.submit_request(one)
    next_of_a = driver.submit_request(ask(client="a", first=30))
    assert seq(driver, next_of_a).account.place == 1
    policy = FairPolicy(SharingSettings(fair_by="key"))
    assert [policy.waiting_key(seq(driver, SeqId(number)))[1] for number in range(5)] == [0, 0, 0, 0, 1]


def test_a_key_pays_for_the_prompt_of_several_choices_once() -> None:
    driver = make_driver(fair_by="key")
    ids = [driver.submit_request(one) for one in ask(3, client="a").choices(1)]
    steps(driver, 4)
    num_generated = sum(len(driver.outputs[each]) for each in ids)
    assert sum(seq(driver, each).key_work for each in ids) == 6 / 2 + num_generated


def test_a_further_choice_has_the_place_of_its_request_and_takes_no_other() -> None:
    """The request is itself a retry; another retry still finds its own place."""
    driver = make_driver("timely")

    def abort(arrival_s: float, now: float) -> None:
        driver.loop.finish(driver.submit_request(ask(arrival_s=arrival_s)), FinishReason.ABORT, now)

    abort(1.0, now=21.0)
    first, second = ask(2, arrival_s=22.0).choices(1)
    one = driver.submit_request(first)
    abort(2.0, now=23.0)
    two, retry = driver.submit_request(second), driver.submit_request(ask(arrival_s=24.0))
    assert [seq(driver, each).order_key[1] for each in (one, two, retry)] == [1.0, 1.0, 2.0]
