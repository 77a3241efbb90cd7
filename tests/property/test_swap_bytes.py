"""Swap space, slots, backups, ledger and pool together: every whole read returns the content of its key.

Each has its own laws. Here they share real bytes: copies end late, fail half-way or meet flipped bits, and the pool is
resized during copies. Blocks that return whole are right, and right blocks return whole.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from floodplain.core.backups import Backup
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.hashing import BlockKey
from floodplain.core.plan import TransferKind
from floodplain.core.tiers import Direction, Tier
from floodplain.memory.digest import compute_digests, compute_weights
from tests.support.backup_faults import commits_what_failed, frees_slots_that_a_copy_reads
from tests.support.examples import examples
from tests.support.swap_books import CONTENT, KEYS, LAYOUT, MAX_BLOCKS, Move, SwapBooks, Tenant
from tests.support.swap_faults import (
    Fault,
    believes_every_digest,
    finds_what_is_lost,
    forgets_pins_of_cached_blocks,
    forgets_pins_of_owned_blocks,
    mixes_up_slots,
)

# -- the state machine in which real bytes meet all their books --------------------------------------------------------


INDEX = st.integers(0, 63)
PREFIX = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)
SHARE = st.sampled_from([None, None, None, 0.0, 0.5])
"""The part of a copy's blocks that is copied before it fails; None: it does not fail."""


class SwapActions(SwapBooks, RuleBasedStateMachine):
    """The rules of the machine."""

    @initialize(
        num_blocks=st.integers(6, MAX_BLOCKS),
        num_slots=st.sampled_from([8, 4, 6]),
        caches=st.sampled_from([True, True, True, False]),
        first=st.lists(PREFIX, min_size=1, max_size=3),
    )
    def begin(self, num_blocks: int, num_slots: int, caches: bool, first: list[list[BlockKey]]) -> None:
        self.open(num_blocks, num_slots, caches)
        for keys in first:
            self.compute(keys)

    # -- on the device ---------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.tenants()) < 4)
    @rule(keys=PREFIX)
    def compute(self, keys: list[BlockKey]) -> None:
        """A request is admitted: blocks on the device are shared, the others are computed."""
        shared = [block for block in map(self.ledger.share, keys) if block is not None]
        fresh = self.ledger.allocate(len(keys) - len(shared))
        if fresh is None:
            self.ledger.free(shared)
            return
        known = {key: block for key in keys if (block := self.ledger.find(key)) is not None}
        blocks = [known[key] if key in known else fresh.pop() for key in keys]
        for key, block in zip(keys, blocks, strict=True):
            if key not in known:
                self.write(block, CONTENT[key])
                self.ledger.seal(block, key)
        self.present.append(Tenant(list(keys), blocks))

    @precondition(lambda self: self.absent or self.out or self.back)
    @rule(num_kept=st.sampled_from([0, 0, 1, 2]))
    def compute_something_else(self, num_kept: int = 0) -> None:
        """Allocate all blocks but a few, overwrite and free them: blocks cached there are evicted."""
        blocks = self.ledger.allocate(max(0, self.ledger.num_available - num_kept)) or []
        for block in blocks:
            self.write(block, torch.full((2, LAYOUT.layer_block_words), -1, dtype=torch.int32))
        self.ledger.free(blocks)

    @precondition(lambda self: len(self.tenants()) > 2 and self.present)
    @rule(index=INDEX)
    def end(self, index: int) -> None:
        tenant = self.present.pop(index % len(self.present))
        self.ledger.free(tenant.blocks)
        self.forget(tenant)

    @precondition(lambda self: self.out or self.back)
    @rule(num_wanted=st.integers(0, MAX_BLOCKS), num_blocks=st.integers(6, MAX_BLOCKS))
    def resize(self, num_wanted: int, num_blocks: int) -> None:
        """The pool shrinks, then grows: blocks that no copy uses may move."""
        shrunk = self.pool.shrink(self.ledger, num_wanted)
        self.device.release(shrunk.pages)
        for tenant in self.present:
            tenant.blocks = [shrunk.moved.get(block, block) for block in tenant.blocks]
        for move in self.back.values():
            move.table = [shrunk.moved.get(block, block) for block in move.table]
        self.pool.grow(self.ledger, max(0, num_blocks - self.pool.num_blocks))

    # -- on the way out --------------------------------------------------------------------------------------------

    @precondition(lambda self: self.present)
    @rule(index=INDEX, leaves=st.sampled_from([True, True, False]))
    def back_up(self, index: int, leaves: bool) -> None:
        """Write blocks without a backup behind; if it leaves, the request frees its blocks at once."""
        tenant = self.present[index % len(self.present)]
        kept = {backup.key for backup in tenant.backups}
        known = [backup for key in tenant.keys if key not in kept and (backup := self.backups.find(key)) is not None]
        self.keep(tenant, known)
        pairs = [(k, b) for k, b in zip(tenant.keys, tenant.blocks, strict=True) if self.backups.find(k) is None]
        backups = self.backups.begin_write(Tier.HOST, [key for key, _ in pairs])
        if backups is None:
            return
        if backups:
            self.keep(tenant, backups)
            self.ledger.pin([block for _, block in pairs])
            self.start(TransferKind.SWAP_OUT, self.out, Move([block for _, block in pairs], backups))
        if leaves:
            self.ledger.free(tenant.blocks)
            self.present.remove(tenant)
            self.absent.append(tenant)

    @precondition(lambda self: self.present)
    @rule(index=INDEX, shares=st.lists(SHARE, max_size=2))
    def go_far_away(self, index: int, shares: list[float | None]) -> None:
        """Swap a request out and evict its blocks from the device: from then on only a copy restores it."""
        self.back_up(index, True)
        while self.out:
            self.land_out(shares.pop() if shares else None)
        self.compute_something_else()

    @precondition(lambda self: self.ledger.num_cached)
    @rule(num_blocks=st.integers(1, 4))
    def save_prefixes(self, num_blocks: int) -> None:
        pairs = [(b, k) for b, k in self.ledger.next_evicted(num_blocks) if self.backups.find(k) is None]
        backups = self.backups.begin_write(Tier.HOST, [key for _, key in pairs])
        if backups:
            self.ledger.pin_cached([block for block, _ in pairs])
            self.start(TransferKind.BACKUP, self.out, Move([block for block, _ in pairs], backups))

    # -- on the way back -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.absent)
    @rule(index=INDEX)
    def come_back(self, index: int) -> None:
        """Restore the longest prefix that is on the device or in swap space; if there is none, the request ends."""
        tenant = self.absent.pop(index % len(self.absent))
        found: list[BlockId | Backup] = []
        for key in tenant.keys:
            block, backup = self.ledger.find(key), self.backups.find_whole(key)
            if block is None and backup is None:
                break
            found.append(block if block is not None else backup)  # type: ignore[arg-type]
        backups = [one for one in found if isinstance(one, Backup)]
        for key, one in zip(tenant.keys, found, strict=False):
            if not isinstance(one, Backup):
                self.ledger.share(key)
        loading = self.ledger.begin_load(len(backups))
        if loading is None or not found:
            self.ledger.free([one for one in found if not isinstance(one, Backup)])
            self.forget(tenant)
            return
        inbound = iter(loading)
        table = [next(inbound) if isinstance(one, Backup) else one for one in found]
        tenant.keys = tenant.keys[: len(found)]
        if not loading:
            tenant.blocks = table
            self.present.append(tenant)
            return
        self.keep(tenant, [backup for backup in backups if backup not in tenant.backups])
        self.backups.begin_read(backups)
        self.arriving.append(tenant)
        self.start(TransferKind.SWAP_IN, self.back, Move(loading, backups, tenant, table))

    @precondition(lambda self: len(self.tenants()) > 2 and (self.absent or self.arriving))
    @rule(index=INDEX)
    def hang_up(self, index: int) -> None:
        """Abort a request that is not on the device; its copy in flight continues."""
        away = [*self.absent, *self.arriving]
        tenant = away[index % len(away)]
        tenant.is_gone = True
        (self.absent if tenant in self.absent else self.arriving).remove(tenant)
        self.forget(tenant)

    # -- copies ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.absent)
    @rule(
        slot=INDEX, layer=st.integers(0, 1), word=st.integers(0, LAYOUT.layer_block_words - 1), bit=st.integers(0, 30)
    )
    def flip(self, slot: int, layer: int, word: int, bit: int) -> None:
        """Flip a bit in swap space; a second flip restores it."""
        slot %= self.slots.num_slots
        self.slots.words[slot, layer, word] ^= 1 << bit
        self.flips ^= {(slot, layer, word, bit)}

    @precondition(lambda self: self.out)
    @rule(share=SHARE)
    def land_out(self, share: float | None) -> None:
        transfer_id = next(iter(self.out))
        move = self.out.pop(transfer_id)
        lost = self.land(Direction.OUTBOUND, transfer_id, move, share)
        slots = {backup.location.slot for backup in move.backups}
        self.flips = {flip for flip in self.flips if flip[0] not in slots}  # the copy has overwritten them
        self.ledger.unpin(move.blocks)
        missing = [move.backups[place] for place in sorted(lost)]
        self.backups.commit_write(backup for backup in move.backups if backup not in missing)
        self.backups.abort_write(missing)
        self.drop_lost(missing)

    @precondition(lambda self: self.back)
    @rule(share=SHARE)
    def land_in(self, share: float | None) -> None:
        """A block is whole exactly if it was copied and not damaged; blocks before the first lost one are kept."""
        transfer_id = next(iter(self.back))
        move = self.back.pop(transfer_id)
        lost = self.land(Direction.INBOUND, transfer_id, move, share)
        tenant = move.tenant
        assert tenant is not None
        bad = {move.blocks[place] for place in lost}
        num_whole = next((index for index, block in enumerate(move.table) if block in bad), len(move.table))
        whole = self.keep_leading(tenant, move, 0 if tenant.is_gone else num_whole)
        self.lose([move.backups[place] for place in sorted(lost)])
        self.backups.finish_read(move.backups)
        if whole.table:
            self.arrive(tenant, whole)
        elif not tenant.is_gone:
            self.arriving.remove(tenant)
            self.absent.append(tenant)


pytestmark = pytest.mark.slow

WEIGHTS = compute_weights(CONTENT[KEYS[0]].numel())
DIGESTS = {key: compute_digests(words.reshape(1, -1).numpy(), WEIGHTS)[0] for key, words in CONTENT.items()}


class SwapMachine(SwapActions):
    """All actions, with the laws checked after each."""

    @invariant()
    def books_balance(self) -> None:
        self.ledger.check_integrity([*(t.blocks for t in self.present), *(m.shared() for m in self.back.values())])
        self.backups.check_integrity()
        assert self.space.num_in_flight == self.copies.num_in_flight == len(self.out) + len(self.back)

    @invariant()
    def everything_readable_is_what_its_key_stands_for(self) -> None:
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
