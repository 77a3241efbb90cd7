"""Random stories for policies that take turns: scarcity of every kind, from a seed alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from floodplain.core.plan import StepPlan
from floodplain.core.request import FinishReason, Goals
from floodplain.policy.base import Policy
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from tests.support.bursts import Machine
from tests.support.driver import Driver
from tests.support.loops import make_request, pick_lost

MAX_TOKENS = 40
"""Most tokens of a request, prompt and output: ten blocks of 4, and every pool has at least as many."""

ROUNDS_PER_TOKEN = 20
"""The bound: rounds of plan, complete and settle for each requested token, after the first 400. Most stories need less
than one; of thousands none without a livelock needed five."""


@dataclass(frozen=True)
class Story:
    """A story's parameters and rates of faults.

    Attributes:
        failing: Share of copies that fail. 0 where a prompt takes many slices: all of its copies must succeed.
        slowness: The probability that a copy stays in flight for one more round.
        hanging_up: The probability of an abort, in each round.
        quaking: The probability, in each round, that the pool shrinks and grows, or evicts its cached blocks.
    """

    seed: int
    num_requests: int
    machine: Machine
    policy: str
    settings: SharingSettings
    failing: float
    slowness: float
    hanging_up: float
    quaking: float


def make_story(seed: int, policy: str, max_requests: int = 24) -> Story:
    """Return a story with a small pool, few slots, small batches, slow links, requests of two keys."""
    dice = Random(seed)
    machine = Machine(
        num_blocks=dice.choice([10, 10, 12, 16, 24]),
        num_slots=dice.choice([0, 1, 3, 8, 20, 60, 400]),
        block_s=dice.choice([0.0, 0.0, 0.01, 0.3, 3.0]),
        latency_s=dice.choice([0.0, 1.0]),
        max_num_seqs=dice.choice([2, 3, 5, 16]),
        max_batched_tokens=dice.choice([1, 3, 6, 16, 64]),
        max_model_len=MAX_TOKENS,
        depth=dice.choice([1, 1, 1, 2]),
        caches_prefixes=dice.random() < 0.7,
    )
    sharing = _make_settings(dice)
    computes_in_a_slice = sharing.slice_steps * machine.max_batched_tokens >= MAX_TOKENS
    return Story(
        seed=seed,
        num_requests=dice.randint(3, max_requests),
        machine=machine,
        policy=policy,
        failing=dice.choice([0.0, 0.3]) if computes_in_a_slice else 0.0,
        slowness=dice.choice([0.0, 0.5, 0.9]),
        hanging_up=dice.choice([0.0, 0.0, 0.05]),
        quaking=dice.choice([0.0, 0.1]),
        settings=sharing,
    )


def _make_settings(dice: Random) -> SharingSettings:
    """Return settings; each call of the driver advances the clock by a second, and a step takes two or more."""
    return SharingSettings(
        slice_steps=dice.choice([1, 2, 4, 9]),
        tpot_goal_s=dice.choice([None, 0.01, 0.08, 5.0]),
        max_gap_s=dice.choice([3.0, 30.0, 1e9]),
        rotation_share=dice.choice([0.1, 0.3, 0.7]),
        prefill_share=dice.choice([0.1, 0.5, 0.9]),
        fair_by=dice.choice(["request", "key"]),
        is_synchronous=dice.random() < 0.2,
    )


class Teller:
    """Runs one story on one loop, with the story's policy unless another one is given."""

    def __init__(self, story: Story, policy: Policy | None = None) -> None:
        self.story = story
        self.dice = Random(story.seed + 1)
        policy = policy or make_policy(story.policy, story.settings)
        self.driver = Driver(story.machine.make_loop(policy, story.seed))
        self.num_told = self.num_tokens = 0

    def tell(self) -> Driver:
        """Run to the end: every request that is not aborted is served, and no block or slot is held."""
        rounds = 0
        while self.num_told < self.story.num_requests or self.driver.loop.has_unfinished:
            rounds += 1
            assert rounds < 400 + ROUNDS_PER_TOKEN * self.num_tokens, "it does not come to rest"
            self._submit()
            self._hang_up()
            self._settle()
            self._quake()
            self._work()
        self.driver.check_at_rest()
        assert len(self.driver.finished) == self.story.num_requests
        assert not self.driver.loop.state.accounts.credits
        return self.driver

    def _submit(self) -> None:
        dice = self.dice
        if self.num_told == self.story.num_requests or dice.random() < 0.6:
            return
        self.num_told += 1
        shared = tuple(range(10, 26))[: dice.choice([0, 0, 4, 8, 16])]
        prompt = shared + tuple(dice.randrange(23) for _ in range(dice.randint(1, 12)))
        max_tokens = dice.randint(1, MAX_TOKENS - len(prompt))
        self.num_tokens += len(prompt) + max_tokens
        request = make_request("r", prompt, self.driver.tick(), max_tokens=max_tokens, ignore_eos=dice.random() < 0.8)
        choices = [None, 1e9, 0.2, 1e-9] if self._keeps_goals() else [None]
        goals = Goals(ttft_s=dice.choice(choices), tpot_s=dice.choice(choices))
        request = replace(request, client=dice.choice("aab"), priority=dice.choice([0, 0, 0, 1, -3]), goals=goals)
        self.driver.submit_request(request)

    def _keeps_goals(self) -> bool:
        return self.driver.loop.policy.keeps_goals and self.story.machine.num_slots > 0

    def _hang_up(self) -> None:
        driver, dice = self.driver, self.dice
        if driver.requests and dice.random() < self.story.hanging_up:
            reason = dice.choice([FinishReason.ABORT, FinishReason.STOP])
            seq_id = dice.choice(list(driver.requests))
            if driver.loop.finish(seq_id, reason, driver.tick()):
                driver.finished[seq_id] = FinishReason.ABORT  # its output is cut short, whatever the reason

    def _settle(self) -> None:
        """Some of the copies end, in any order; a lost block may have been written, or not."""
        driver, dice = self.driver, self.dice
        while driver.executor.transfers and dice.random() >= self.story.slowness:
            transfer = driver.executor.transfers.pop(dice.randrange(len(driver.executor.transfers)))
            lost = () if dice.random() >= self.story.failing else pick_lost(dice, transfer)
            driver.executor.copy(transfer, lost if dice.random() < 0.5 else ())
            driver.loop.transfer_done(transfer.transfer_id, lost, driver.tick())
            driver.loop.check_integrity()

    def _quake(self) -> None:
        driver, dice = self.driver, self.dice
        if dice.random() >= self.story.quaking:
            return
        if dice.random() < 0.5:
            driver.evict_everything()
        elif not driver.pending:
            driver.shrink(dice.randrange(self.story.machine.num_blocks))
            driver.grow_back()

    def _work(self) -> None:
        driver, depth = self.driver, self.story.machine.depth
        for _ in range(depth):
            if not isinstance(driver.plan(), StepPlan) and not driver.pending:
                assert not driver.loop.has_unfinished or driver.executor.transfers, "the loop waits for nothing"
        if driver.pending and (len(driver.pending) == depth or self.dice.random() < 0.8):
            driver.complete()
