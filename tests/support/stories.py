"""Long random stories of a loop; each depends on its seed alone, so it can be repeated."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from floodplain.core.errors import InvariantError
from floodplain.core.request import FinishReason
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.runtime.loop import Loop
from tests.support.driver import Driver
from tests.support.loops import RandomPolicy, make_loop, make_request, pick_lost

EVENTS = ("submit", "plan", "plan", "plan", "complete", "complete", "settle", "finish", "shrink", "evict")


def make_story_loop(seed: int, depth: int, num_slots: int, caches: bool) -> Loop:
    """Return a loop over a small pool with a random policy."""
    return make_loop(
        policy=RandomPolicy(),
        num_blocks=9,
        num_slots=num_slots,
        depth=depth,
        max_model_len=24,
        max_num_seqs=5,
        max_batched_tokens=1 + seed % 12,
        caches_prefixes=caches,
        seed=seed,
    )


def tell(loop: Loop, seed: int, num_events: int = 200) -> Driver:
    """Run random events: requests that share prefixes, copies that fail, aborts; then all requests end."""
    driver, story = Driver(loop), Random(seed)
    for _ in range(num_events):
        try:
            _happen(driver, story, story.choice(EVENTS))
        except InvariantError as error:
            if "without end" not in str(error):
                raise
            return driver  # once in some thousand stories the random policy preempts and resumes for too long
    _come_home(driver)
    return driver


def _happen(driver: Driver, story: Random, event: str) -> None:
    if event == "submit" and len(driver.loop.state.sequences) < 8:
        shared = tuple(range(10, 18))[: story.choice([0, 4, 8])]
        rest = tuple(story.randrange(23) for _ in range(story.randint(1, 5)))
        request = make_request(
            "r", shared + rest, driver.tick(), max_tokens=story.randint(1, 9), ignore_eos=story.random() < 0.5
        )
        driver.submit_request(replace(request, priority=story.choice([0, 0, 0, 1, -1])))
    elif event == "plan":
        driver.plan()
    elif event == "complete" and driver.pending:
        driver.complete()
    elif event == "settle" and driver.executor.transfers:
        is_whole = story.random() < 0.7
        driver.settle(lost=() if is_whole else pick_lost(story, driver.executor.transfers[0]))
    elif event == "finish" and driver.requests and story.random() < 0.3:
        reason = story.choice([FinishReason.ABORT, FinishReason.STOP])
        _finish(driver, story.randrange(len(driver.requests)), reason)
    elif event == "shrink" and not driver.pending:
        driver.shrink(story.randrange(9))
        driver.grow_back()
    elif event == "evict":
        driver.evict_everything()


def _finish(driver: Driver, index: int, reason: FinishReason) -> None:
    seq_id = list(driver.requests)[index]
    if driver.loop.finish(seq_id, reason, driver.tick()):
        driver.finished[seq_id] = FinishReason.ABORT  # its output is cut short, whatever the reason


def _come_home(driver: Driver) -> None:
    """Finish with a work-conserving policy; abort swapped sequences, which it never resumes."""
    loop = driver.loop
    loop.policy = FcfsPolicy()
    while loop.state.swapped or loop.state.loading or driver.executor.transfers or driver.pending:
        while driver.executor.transfers:
            driver.settle()
        for seq in list(loop.state.swapped):
            _finish(driver, seq.seq_id, FinishReason.ABORT)
        if driver.pending:
            driver.complete()
    driver.run()
    for seq_id, output in driver.outputs.items():
        assert output == driver.reference(seq_id)[: len(output)]
