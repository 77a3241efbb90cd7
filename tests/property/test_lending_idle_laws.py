"""Which chunks a borrower returns, and when it requests again: none in use is returned, and leases do not flap.

A model of a tier records when each chunk was really used, and its contents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.leases.states import LeaseId
from floodplain.lending.peer_tier import CHECKS_PER_IDLE, ChunkUse, IdleChunks
from tests.support.controls import Broken, Controls, Fault
from tests.support.examples import examples

IDLE_S, SLOTS, MOST = 8.0, 4, 6
STEP_S = 0.25


@dataclass
class Tier:
    """Chunks and their contents; a requested chunk is granted soon."""

    seed: int
    changes: bool = True
    idle_s: float = IDLE_S
    now: float = 0.0
    host_kept: int = 0
    num_grants: int = 0
    returned: list[tuple[float, LeaseId]] = field(default_factory=list)
    raises: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.idle = IdleChunks(self.idle_s, SLOTS, MOST)
        self.kept: dict[LeaseId, int] = {}
        self.copies: dict[LeaseId, int] = {}
        self.used_s: dict[LeaseId, float] = {}
        self.load = self.random.randint(0, MOST * SLOTS)
        self.returned_at: tuple[int, bool] | None = None

    @property
    def num_kept(self) -> int:
        return sum(self.kept.values())

    @property
    def is_needed(self) -> bool:
        return self.num_kept + self.host_kept > 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.now += STEP_S
            if self.changes and self.random.random() < 0.03:
                self.load = self.random.choice([0, 0, 1, self.random.randint(0, MOST * SLOTS)])
            self._place_load()
            self._look()

    def _place_load(self) -> None:
        """Spread the load over the chunks; the rest is in host memory."""
        for chunk in sorted(self.kept, key=lambda chunk: (-self.kept[chunk], chunk)):
            others = sum(num for one, num in self.kept.items() if one != chunk)
            kept = min(SLOTS, max(0, self.load - others))
            if self.kept[chunk] or kept:
                self.used_s[chunk] = self.now
            self.copies[chunk] += kept > self.kept[chunk]
            self.kept[chunk] = kept
            if self.changes and self.random.random() < 0.01:  # a prefix that no request keeps is read
                self.copies[chunk] += 1
                self.used_s[chunk] = self.now
        self.host_kept = self.load - self.num_kept

    def _look(self) -> None:
        if self.idle.is_due(self.now):
            uses = {chunk: ChunkUse(self.copies[chunk], kept) for chunk, kept in self.kept.items()}
            self._return(self.idle.choose(self.now, uses, self.is_needed))
        before = self.idle.num_wanted
        self.idle.note_room(len(self.kept), SLOTS * len(self.kept) - self.num_kept, self.is_needed)
        if self.idle.num_wanted > before:
            self.raises.append((self.num_kept, self.idle.num_wanted - len(self.kept)))
            self._judge_raise()
        if len(self.kept) < self.idle.num_wanted and self.random.random() < 0.5:
            self.num_grants += 1
            chunk = LeaseId(str(self.num_grants))
            self.kept[chunk], self.copies[chunk], self.used_s[chunk] = 0, 0, self.now

    def _return(self, chunks: list[LeaseId]) -> None:
        for chunk in chunks:
            assert not self.kept[chunk], "needed blocks lie there"
            assert self.now - self.used_s[chunk] >= IDLE_S * (1 - 1 / CHECKS_PER_IDLE), "it was used a moment ago"
            del self.kept[chunk]
            self.returned.append((self.now, chunk))
        if chunks:
            assert not self.is_needed or SLOTS * len(self.kept) - self.num_kept >= SLOTS, "no room stays"
            self.returned_at = self.num_kept, self.is_needed

    def _judge_raise(self) -> None:
        """Assert that a chunk is requested again only if use grew by half a chunk since the return, or from none."""
        if self.returned_at is not None:
            num_kept, was_needed = self.returned_at
            assert self.num_kept - num_kept > SLOTS / 2 or not was_needed, "it was returned, and is asked for again"


@settings(max_examples=examples(40))
@given(st.integers(0, 2**32))
def test_nothing_in_use_is_returned_and_nothing_requested_again_at_once(seed: int) -> None:
    Tier(seed).run(600)


@settings(max_examples=examples(40))
@given(st.integers(0, 2**32))
def test_a_load_that_stays_as_it_is_keeps_its_leases(seed: int) -> None:
    """After the first idle time no chunk is returned or requested."""
    tier = Tier(seed, changes=False)
    tier.run(round(3 * IDLE_S / STEP_S))
    before, held = list(tier.returned), set(tier.kept)
    tier.run(round(10 * IDLE_S / STEP_S))
    assert (tier.returned, set(tier.kept)) == (before, held)
    assert SLOTS * len(held) >= min(tier.load, MOST * SLOTS)


@settings(max_examples=examples(40))
@given(st.integers(0, 2**32))
def test_unused_chunks_are_returned_in_time_and_borrowed_again_on_demand(seed: int) -> None:
    tier = Tier(seed)
    tier.run(200)
    tier.load, tier.changes = 0, False
    tier.run(round(2 * IDLE_S * (1 + 2 / CHECKS_PER_IDLE) / STEP_S))  # one may be granted after all use has ended
    assert not tier.kept
    tier.load = MOST * SLOTS
    tier.run(200)
    assert len(tier.kept) == MOST and not tier.host_kept


def test_zero_keeps_everything() -> None:
    tier = Tier(7, idle_s=0.0)
    tier.run(2000)
    assert not tier.returned and len(tier.kept) == tier.idle.num_wanted == MOST


CONTROLS = Controls()


@CONTROLS.breaks(IdleChunks, "choose")
def what_is_read_is_not_seen(
    original: Broken, idle: IdleChunks, now: float, chunks: Mapping[LeaseId, ChunkUse], is_needed: bool
) -> list[LeaseId]:
    return original(idle, now, {chunk: ChunkUse(0, use.num_kept) for chunk, use in chunks.items()}, is_needed)


CONTROLS.add("no_room_is_left", IdleChunks, "choose", lambda choose, *about: choose(*about[:-1], False))
CONTROLS.add(
    "more_is_wanted_whenever_a_chunk_is_half_full",
    IdleChunks,
    "note_room",
    lambda note, idle, held, free, needed: note(idle, held, free - 2 * SLOTS, needed),
)


@pytest.mark.parametrize("fault", CONTROLS)
def test_a_broken_rule_is_seen(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(40):
            Tier(seed).run(600)
