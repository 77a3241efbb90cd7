"""A running request moves between two running loops: it keeps its tokens, wherever the move ends."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.errors import InvariantError
from floodplain.core.plan import StepPlan
from floodplain.core.request import FinishReason, SeqId
from floodplain.policy.registry import make_policy
from floodplain.runtime.handover import Incoming, Outgoing, Stopped
from tests.support.driver import Driver
from tests.support.examples import examples
from tests.support.loops import AheadPolicy, make_loop

MAX_MODEL_LEN = 48
MOVES, RETURNS, RECOMPUTED, EARLY = "moves", "returns", "computed again", "given up early"


@dataclass
class Way:
    """The move of one request between two loops."""

    source: Driver
    target: Driver
    seq_id: SeqId
    copies_tail: bool = True

    def __post_init__(self) -> None:
        self.outgoing = Outgoing(self.source.loop, self.source.requests[self.seq_id])
        self.incoming = Incoming(self.target.loop)
        self.num_copied = 0

    def copy(self) -> bool:
        """Copy held blocks that are not yet copied; return whether the target had room."""
        blocks = self.outgoing.blocks[self.num_copied :]
        targets = self.incoming.reserve(len(blocks))
        for a, b in zip(blocks, targets or (), strict=targets is not None):
            content = dict(self.source.executor.blocks[a])
            is_partial = len(content) < self.source.executor.block_tokens
            self.target.executor.blocks[b] = {} if is_partial and not self.copies_tail else content
        self.num_copied += len(blocks)
        return targets is not None

    def stage(self) -> bool:
        """Copy sealed blocks while the request runs on."""
        return self.outgoing.hold_sealed() and self.copy()

    def stop(self) -> Stopped | None:
        """Hold all blocks, and end the request in the source."""
        stopped = self.outgoing.stop(self.num_copied)
        if stopped is not None:
            assert stopped.seq_id == self.seq_id
            self.source.loop.finish(self.seq_id, FinishReason.ABORT, self.source.tick())
        return stopped

    def submit(self, driver: Driver) -> SeqId:
        """Submit the request with its known tokens; return its new id."""
        known = self.source.outputs[self.seq_id]
        request = replace(
            self.source.requests[self.seq_id], known_token_ids=tuple(known), request_id="moved", is_accepted=True
        )
        name = driver.submit_request(request)
        driver.outputs[name] = list(known)
        return name

    def go_on(self, stopped: Stopped, end: str, *, is_copied: bool) -> bool:
        """Submit the request where it continues; return whether it runs there from its KV."""
        driver = self.target if is_copied and end == MOVES else self.source
        name = self.submit(driver)
        if end == RECOMPUTED:
            return False
        if driver is self.target:
            return self.incoming.adopt(name, stopped.num_computed, driver.tick())
        return self.outgoing.adopt(name, driver.tick())

    def release(self) -> None:
        self.outgoing.release()
        self.incoming.release()


def go(driver: Driver, num_steps: int) -> None:
    """Plan and complete steps; some may stay outstanding."""
    for _ in range(num_steps):
        while driver.executor.transfers:
            driver.settle()
        is_planned = isinstance(driver.plan(), StepPlan)
        if driver.pending and not (is_planned and len(driver.pending) < driver.loop.state.config.depth):
            driver.complete()


def migrate(way: Way, end: str, gaps: list[int]) -> bool:
    """Move a request as far as ``end`` states; return whether it continues from its KV under another id."""
    for gap in gaps:
        if not way.stage():
            way.release()
            return False
        for driver in (way.source, way.target):
            go(driver, gap)
    stopped = None if end == EARLY else way.stop()
    runs_on = False
    if stopped is not None:
        go(way.source, 2)  # an outstanding step ends, and others begin: its blocks do not change
        runs_on = way.go_on(stopped, end, is_copied=way.copy())
    way.release()
    return runs_on


def finish_all(way: Way) -> None:
    """All outputs equal those of undisturbed runs, and all blocks are free: see ``Driver.check_at_rest``."""
    for driver in (way.source, way.target):
        while driver.pending:
            driver.complete()
        driver.run()
        assert not driver.loop.state.awaits_blocks


def open_way(
    depth: int, num_blocks: int, prompts: list[int], num_steps: int, *, policy: str = "fcfs", copies_tail: bool = True
) -> Way:
    """Return two loops with some requests each; the first request of the source is to move."""
    both = []
    for side in range(2):
        loop = make_loop(
            policy=AheadPolicy() if depth > 1 else make_policy(policy),
            num_blocks=num_blocks,
            num_slots=0 if policy == "fcfs" else 40,
            depth=depth,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=4,
        )
        driver = Driver(loop)
        both.append(driver)
        for number, length in enumerate(prompts[side::2]):
            driver.submit([(side + 3 * number + place) % 23 for place in range(length)], max_tokens=16, ignore_eos=True)
    go(both[0], num_steps)
    go(both[1], num_steps // 2)
    return Way(both[0], both[1], SeqId(0), copies_tail)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(["fcfs", "fcfs", "cfs", "fair"]),
    st.sampled_from([1, 1, 2]),
    st.integers(12, 24),
    st.lists(st.integers(1, 20), min_size=2, max_size=7),
    st.integers(0, 14),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([MOVES, MOVES, RETURNS, RECOMPUTED, EARLY]),
)
def test_a_request_that_moves_or_comes_back_keeps_its_tokens(
    policy: str, depth: int, num_blocks: int, prompts: list[int], num_steps: int, gaps: list[int], end: str
) -> None:
    way = open_way(depth if policy == "fcfs" else 1, num_blocks, prompts, num_steps, policy=policy)
    migrate(way, end, gaps)
    finish_all(way)


def moving(*, copies_tail: bool) -> Way:
    way = open_way(1, 24, [9, 5], 7, copies_tail=copies_tail)
    assert migrate(way, MOVES, [2, 2])
    return way


@pytest.mark.parametrize("end", [MOVES, RETURNS])
def test_no_token_is_computed_again_when_kv_moves_or_stays(end: str) -> None:
    way = open_way(1, 24, [9, 5], 7)
    assert migrate(way, end, [2, 2])
    finish_all(way)
    driver = way.target if end == MOVES else way.source
    (moved,) = (name for name, request in driver.requests.items() if request.request_id == "moved")
    fed = [chunk for plan in driver.executor.plans for chunk in plan.prefills if chunk.seq_id == moved]
    assert [len(chunk.token_ids) for chunk in fed] == [1]  # its last token, which had no KV yet


def test_a_partly_filled_block_that_is_not_copied_is_noticed() -> None:
    with pytest.raises((AssertionError, KeyError)):
        finish_all(moving(copies_tail=False))
    finish_all(moving(copies_tail=True))


def test_a_preempted_request_is_not_stopped_and_what_was_held_is_free() -> None:
    way = open_way(1, 24, [9, 5], 7)
    assert way.stage()
    num_copied = way.num_copied
    way.source.loop.finish(way.seq_id, FinishReason.ABORT, way.source.tick())
    assert way.outgoing.blocks and num_copied and way.stop() is None and not way.outgoing.hold_sealed()
    assert way.source.loop.state.awaits_blocks
    way.release()
    finish_all(way)


def test_blocks_of_another_number_of_tokens_are_not_adopted() -> None:
    way = open_way(1, 24, [9, 5], 7)
    assert way.stage()
    with pytest.raises(InvariantError, match="are not in"):
        way.incoming.adopt(SeqId(0), 1, 0.0)
