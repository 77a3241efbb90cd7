"""KV kept for sessions in the plug-in equals that of the engine's own session book, in random stories of clients.

``runtime.sessions`` has laws of its own. Here it is the oracle: it gets the facts of each request directly.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from floodplain.core.backups import BackupTable
from floodplain.core.hashing import BlockKey
from floodplain.core.plan import Decision
from floodplain.core.tiers import SlotLedger, Tier
from floodplain.core.view import View
from floodplain.plugins.vllm.books import SwapBooks
from floodplain.plugins.vllm.kept_sessions import KeptSessions
from floodplain.plugins.vllm.tracked import TrackedRequest
from floodplain.runtime.sessions import SessionBook
from tests.support.examples import examples
from tests.support.vllm_books import BLOCK_TOKENS, Block
from tests.support.vllm_sessions import BLOCK_BYTES, NUM_WORKERS, Office

MANY_SLOTS, FEW_SLOTS = 500, 6
MOST_BLOCKS, MOST_LIVE = 6, 3
NO_VIEW = cast(View, SimpleNamespace(swapped=()))
EVENTS = (*("arrive", "start", "end", "wait") * 3, "start_again", "record", "abort")


@dataclass(eq=False)
class Live:
    """A live request; it waits if it has no blocks."""

    one: TrackedRequest
    blocks: list[Block]

    @property
    def request(self) -> Any:
        return self.one.request


class Story:
    """Clients of two tenants send prompts of four texts that begin alike, some under one session's name.

    With ``MANY_SLOTS`` no copy is evicted.
    """

    def __init__(self, seed: int, num_slots: int) -> None:
        self.office, self.dice, self.now = Office(num_slots), Random(seed), 0.0
        self.kept, self.has_room = self.office.books.backups, num_slots == MANY_SLOTS
        self.told = BackupTable([SlotLedger(Tier.HOST, num_slots)])
        self.oracle = SessionBook(self.told)
        self.live: list[Live] = []
        self.copied, self.whole = set[BlockKey](), set[BlockKey]()  # copies that began, and those that have ended
        self.num_restored, self.counted = 0, Counter[str]()
        self.gauges: dict[str, float] = {}

    # -- events ----------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        if len(self.live) == MOST_LIVE:
            return
        text, name = self.dice.choice(["aaa", "aab", "abb", "bbb"]), self.dice.choice(["app", None])
        salt, num_tokens = self.dice.choice(["tenant", None]), self.dice.randrange(1, MOST_BLOCKS * BLOCK_TOKENS)
        one = self.office.arrive(text, num_tokens, self.now, name=name, salt=salt)
        one.request.skip_reading_prefix_cache = self.dice.random() < 0.2
        number = self.oracle.arrive(name or "", salt or "", one.request.block_hashes, self.now)
        assert one.session == number, "the requests of a session"
        self.live.append(Live(one, []))

    def start(self) -> None:
        """Restore what is found by content, compute the rest, and get one to six tokens."""
        waiting = [live for live in self.live if not live.blocks]
        if not waiting:
            return
        live = self.dice.choice(waiting)
        num_found = self.count_found(live.request)
        live.blocks = self.office.pool.give(MOST_BLOCKS + 2)
        num_restored = self.office.restore(live.one, live.blocks)
        self.whole |= self.copied if num_restored else set()  # copies that were under way have ended, too
        assert num_restored == num_found * BLOCK_TOKENS if self.has_room else num_restored <= num_found * BLOCK_TOKENS
        self.num_restored += num_restored
        self.oracle.start(live.one.session or 0, self.now)
        self.office.sessions.start(live.one, self.now)
        live.request.num_tokens += self.dice.randrange(1, 7)
        live.request.num_computed_tokens = live.request.num_tokens - self.dice.randrange(2)
        self.office.extend(live.one)

    def start_again(self) -> None:
        """A preempted request is resumed."""
        if running := [live for live in self.live if live.blocks]:
            self.office.sessions.start(self.dice.choice(running).one, self.now)

    def end(self) -> None:
        """The last token of a request, which an outstanding step may still compute, is not kept."""
        if not self.live:
            return
        live = self.live.pop(self.dice.randrange(len(self.live)))
        num_kept = min(live.request.num_computed_tokens, live.request.num_tokens - 1) // BLOCK_TOKENS
        keys, least_chance = live.request.block_hashes[:num_kept], self.dice.choice([0.0, 0.0, 0.7, 1.0])
        pin = self.oracle.end(live.one.session or 0, keys, self.now, least_chance)
        self.office.finish(live.one, live.blocks, self.now, least_chance)
        self.copied |= set(keys if pin is not None else ())
        if self.dice.random() < 0.5:
            self.settle()

    def settle(self) -> None:
        num_copied = sum(self.office.copy())
        assert num_copied == len(self.copied - self.whole) or not self.has_room, "contents without a copy"
        self.whole |= self.copied

    def abort(self) -> None:
        if self.live:
            live = self.live.pop(self.dice.randrange(len(self.live)))
            self.oracle.give_up(live.one.session or 0)
            self.office.abort(live.one, live.blocks)

    def wait(self) -> None:
        self.now += self.dice.choice([0.1, 0.1, 0.1, 1.0, 1.0, 10.0, 5000.0])
        self.oracle.advance(self.now)
        self.office.sessions.book.advance(self.now)

    def record(self) -> None:
        self.office.controller.record(NO_VIEW, self.now, Decision())
        told = self.office.controller.tally.take()
        self.counted.update(told["counts"])
        self.gauges |= told["gauges"]
        pinned = {key for pin in self.kept.idle.pins for key in pin.keys}
        num_idle = sum(backup.num_keepers == 0 for key in pinned if (backup := self.kept.find_whole(key)) is not None)
        assert self.gauges["swap_pinned_bytes host"] == num_idle * BLOCK_BYTES * NUM_WORKERS

    # -- laws ------------------------------------------------------------------------------------------------------

    def count_found(self, request: Any) -> int:
        """Return the leading blocks that have a copy. The last token of a prompt is computed in any case."""
        most = 0 if request.skip_reading_prefix_cache else (request.num_tokens - 1) // BLOCK_TOKENS
        keys = request.block_hashes[:most]
        return next((place for place, key in enumerate(keys) if key not in self.whole), len(keys))

    def check(self) -> None:
        """Expect the oracle's pins, and that waiting requests are shown what they would find now."""
        kept, told = (
            sorted((pin.tenant, pin.keys, pin.worth) for pin in table.idle.pins) for table in (self.kept, self.told)
        )
        assert kept == told
        self.office.books.take_changed()
        for live in self.live:
            if not live.blocks:
                found = self.office.books.count_saved(live.one, (live.request.num_tokens - 1) // BLOCK_TOKENS)
                assert found == self.count_found(live.request)

    @property
    def totals(self) -> dict[str, int]:
        counts = self.oracle.counts if self.has_room else self.office.sessions.book.counts
        return {
            "session_returns_total pinned": counts.hits,
            "session_returns_total unpinned": counts.misses,
            "unpinned_blocks_total expired": counts.num_expired_blocks,
            "unpinned_blocks_total evicted": self.kept.idle.num_unpinned_blocks,
            "restored_prompt_tokens_total": self.num_restored,
        }


def walk(seed: int, num_slots: int = MANY_SLOTS, num_events: int = 600) -> Story:
    story = Story(seed, num_slots)
    for _ in range(num_events):
        getattr(story, story.dice.choice(EVENTS))()
        if story.has_room:
            story.check()
    story.record()
    assert story.counted == Counter(story.totals)
    return story


@pytest.mark.parametrize("seed", range(examples(6)))
def test_kept_sessions_are_those_of_our_own_engine(seed: int) -> None:
    walk(seed)


@pytest.mark.parametrize("seed", range(examples(6)))
def test_with_few_slots_no_more_is_found_than_was_left(seed: int) -> None:
    walk(seed, FEW_SLOTS)


def test_walks_count_everything() -> None:
    few, many = walk(0, FEW_SLOTS), walk(0)
    assert few.totals["unpinned_blocks_total evicted"] > 0 == many.totals["unpinned_blocks_total evicted"]
    assert all(many.counted[name] for name in many.totals if name != "unpinned_blocks_total evicted")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(KeptSessions, "start"), (KeptSessions, "give_up"), (SwapBooks, "save"), (SwapBooks, "adopt")],
)
def test_the_law_notices_a_plugin_that_does_not(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, lambda *_: None)
    with pytest.raises(AssertionError):
        walk(0)
