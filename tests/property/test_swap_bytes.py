"""Swap space, slots, backups, ledger and pool together: every whole read returns the content of its key.

Each has its own laws. Here they share real bytes: copies end late, fail half-way or meet flipped bits, and the pool is
resized during copies. Blocks that return whole are right, and right blocks return whole.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from floodplain.core.errors import InvariantError
from floodplain.memory.digest import compute_digests, compute_weights
from tests.support.backup_faults import commits_what_failed, frees_slots_that_a_copy_reads
from tests.support.examples import examples
from tests.support.swap_books import CONTENT, KEYS
from tests.support.swap_faults import (
    Fault,
    believes_every_digest,
    finds_what_is_lost,
    forgets_pins_of_cached_blocks,
    forgets_pins_of_owned_blocks,
    mixes_up_slots,
)
from tests.support.swap_machine import SwapActions

pytestmark = pytest.mark.slow

WEIGHTS = compute_weights(CONTENT[KEYS[0]].numel())
DIGESTS = {key: compute_digests(words.reshape(1, -1).numpy(), WEIGHTS)[0] for key, words in CONTENT.items()}


class SwapMachine(SwapActions):
    """All actions, with the laws checked after each."""

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "ids"):
            return
        self.ledger.check_integrity([*(t.blocks for t in self.present), *(m.shared() for m in self.back.values())])
        self.backups.check_integrity()
        assert self.space.num_in_flight == self.copies.num_in_flight == len(self.out) + len(self.back)

    @invariant()
    def everything_readable_is_what_its_key_stands_for(self) -> None:
        if not hasattr(self, "ids"):
            return
        readable = {
            (key, block) for tenant in self.present for key, block in zip(tenant.keys, tenant.blocks, strict=True)
        }
        readable |= {(key, block) for key in KEYS if (block := self.ledger.find(key)) is not None}
        self.pool.expect_backed(block for _, block in readable)
        for key, block in readable:
            for words, part in zip(self.pool.words, CONTENT[key], strict=True):
                assert torch.equal(words[block], part), f"block {block} holds something else"

    @invariant()
    def every_whole_backup_is_what_left_but_for_the_bits_that_flipped(self) -> None:
        if not hasattr(self, "ids"):
            return
        for backup in [backup for backup in map(self.backups.find_whole, KEYS) if backup is not None]:
            slot = backup.location.slot
            assert backup not in self.lost, "what was a miss is an answer again"
            assert self.slots.digests[slot] == DIGESTS[backup.key], f"slot {slot} has another digest"
            if slot not in {flip[0] for flip in self.flips}:
                assert torch.equal(self.slots.words[slot], CONTENT[backup.key]), f"slot {slot} holds something else"

    def teardown(self) -> None:
        if hasattr(self, "ids"):
            try:
                self.come_to_rest()
            finally:
                self.close()

    def come_to_rest(self) -> None:
        """Everything taken is released."""
        while self.out:
            self.land_out(None)
        while self.back:
            self.land_in(None)
        while self.absent:
            self.hang_up(0)
        while self.present:
            self.end(0)
        self.books_balance()
        assert self.ledger.num_available == self.ledger.num_blocks
        assert self.backups.is_at_rest


EXAMPLES = settings(
    max_examples=examples(100), stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
SwapMachine.TestCase.settings = EXAMPLES
TestSwapMachine = SwapMachine.TestCase


def tour(machine: SwapMachine) -> None:
    """Every case once, with the laws checked after each step."""

    def do(name: str, *args: object) -> None:
        getattr(machine, name)(*args)
        machine.books_balance()
        machine.everything_readable_is_what_its_key_stands_for()
        machine.every_whole_backup_is_what_left_but_for_the_bits_that_flipped()

    try:
        machine.begin(8, 4, True, [KEYS[:2]])
        do("back_up", 0, True)
        do("compute_something_else")  # cannot take the blocks that the copy reads
        do("land_out", None)
        do("compute_something_else")
        do("come_back", 0)
        do("resize", 0, 8)
        do("compute_something_else")
        do("land_in", None)
        do("go_far_away", 0, [])
        do("flip", machine.absent[0].backups[0].location.slot, 1, 7, 3)
        do("come_back", 0)
        do("land_in", None)  # a miss of the first block, so nothing is restored
        assert len(machine.absent[0].backups) == 1
        do("come_back", 0)  # without any block
        do("compute", KEYS[2:4])
        do("back_up", 0, True)
        do("land_out", 0.5)
        do("save_prefixes", 2)
        do("compute_something_else")
        do("land_out", None)
        do("compute_something_else")
        do("come_back", 0)  # with an idle backup
        do("hang_up", 0)
        do("compute", [*KEYS[4:], *KEYS[:2]])
        do("back_up", 0, False)  # cannot take the slots that the copy reads
        assert not machine.out
        do("land_in", None)
        do("back_up", 0, False)
        do("land_out", None)
        machine.come_to_rest()
    finally:
        machine.close()


def test_a_tour_of_every_corner() -> None:
    tour(SwapMachine())


# -- negative controls -------------------------------------------------------------------------------------------------


ALWAYS_FOUND: list[Fault] = [believes_every_digest, mixes_up_slots, forgets_pins_of_owned_blocks, commits_what_failed]
RARELY_FOUND: list[Fault] = [forgets_pins_of_cached_blocks, frees_slots_that_a_copy_reads, finds_what_is_lost]


@pytest.mark.parametrize("fault", [*ALWAYS_FOUND, *RARELY_FOUND])
def test_the_tour_notices_a_program_that(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, InvariantError)):
        tour(SwapMachine())


@pytest.mark.parametrize("fault", ALWAYS_FOUND)
def test_the_random_machine_notices_a_program_that(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    hunt = settings(EXAMPLES, max_examples=500, phases=[Phase.generate], report_multiple_bugs=False, derandomize=True)
    with pytest.raises((AssertionError, InvariantError)):
        run_state_machine_as_test(SwapMachine, settings=hunt)
