"""Slots come and go under a running loop: whatever is moved, dropped or torn away, every token is right.

A fake executor holds the content of every block and slot. A chunk of peer slots is added, retired and emptied, or torn
away with its contents, at any boundary; copies end in any order, and those that touch removed memory fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.backups import BackupTable
from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError
from floodplain.core.plan import Decision, Relocation, StepPlan, Transfer, TransferKind
from floodplain.core.tiers import Link, Location, SlotLedger, Tier
from floodplain.core.view import View
from floodplain.leases.states import LeaseId
from floodplain.lending.peer_tier import ChunkUse, IdleChunks
from floodplain.runtime.loop import Loop
from floodplain.runtime.relocations import Relocations
from floodplain.runtime.state import LoopConfig, LoopState
from tests.support.backup_faults import moves_what_is_read
from tests.support.controls import Controls, Fault
from tests.support.examples import examples
from tests.support.loops import EOS, FakeExecutor, RandomPolicy, make_request, reference_output

CHUNK_SLOTS, NUM_CHUNKS = 3, 3
IDLE_S = 8.0
MAX_MODEL_LEN = 64


class PatientPolicy(RandomPolicy):
    """Calls ``rest`` from its third decision about one step on."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = Counter[int]()

    def decide(self, view: View, now: float, rng: Random) -> Decision:
        self._asked[view.step] += 1
        if self._asked[view.step] >= 3:
            return self.rest(view, now, rng)
        return super().decide(view, now, rng)


class Neighbourhood:
    """A loop, its executor, and chunks of slots on a neighbour."""

    def __init__(self, seed: int, num_host_slots: int) -> None:
        self.random = Random(seed)
        self.speed = self.random.choice([0.1, 0.5])  # of copies to and from the device
        policy = PatientPolicy()
        config = LoopConfig(
            max_model_len=MAX_MODEL_LEN, max_batched_tokens=16, max_num_seqs=8, eos_token_ids=frozenset({EOS})
        )
        backups = BackupTable([SlotLedger(Tier.PEER, 0), SlotLedger(Tier.HOST, num_host_slots)])
        links = [Link(Tier.PEER, 1e9), Link(Tier.HOST, 1e9)]
        self.state = LoopState(config, BlockLedger(12, 4, quantum_blocks=2), policy, backups, links)
        self.loop = Loop(self.state, policy, seed)
        self.executor = FakeExecutor(block_tokens=4)
        self.relocations: list[Relocation] = []
        self.chunks: dict[int, bool] = {}  # those with memory, and whether they are being emptied
        self.idle = IdleChunks(IDLE_S, CHUNK_SLOTS, NUM_CHUNKS)
        self.num_copies: Counter[int] = Counter()
        self.seen: Counter[str] = Counter()
        self.now = 0.0

    def run(self, num_requests: int) -> None:
        """Serve until all requests have ended; every output equals the reference."""
        requests = [self._request(index) for index in range(num_requests)]
        waiting, outputs = list(requests), {}
        for _ in range(3000):
            self.now += 1.0
            if waiting and self.random.random() < 0.3:
                outputs[self.loop.submit(waiting.pop())] = []
            self._change_chunks()
            self._end_copies()
            self.loop.check_integrity()
            plan = self.loop.next_plan(self.now)
            if isinstance(plan, StepPlan):
                result = self.loop.complete(self.executor.execute(plan), self.now)
                for seq_id, token in zip(result.seq_ids, result.token_ids, strict=True):
                    outputs[seq_id].append(token)
            if not waiting and not self.loop.has_unfinished:
                break
        assert not self.loop.has_unfinished
        expected = [reference_output(request, MAX_MODEL_LEN) for request in reversed(requests)]
        assert list(outputs.values()) == expected

    def _request(self, index: int):  # type: ignore[no-untyped-def]
        length = self.random.randint(1, 12)
        prompt = tuple(self.random.randint(1, 3) for _ in range(length))
        return make_request(f"r{index}", prompt, max_tokens=self.random.randint(1, 20))

    # -- chunks ------------------------------------------------------------------------------------------------------

    def _slots(self, chunk: int) -> range:
        return range(chunk * CHUNK_SLOTS, (chunk + 1) * CHUNK_SLOTS)

    def _count_taken(self, chunk: int) -> int:
        return self.loop.relocations.backups.slots[Tier.PEER].count_taken(self._slots(chunk))

    def _change_chunks(self) -> None:
        between, backups, dice = self.loop.relocations, self.loop.relocations.backups, self.random.random()
        chunk = self.random.randrange(NUM_CHUNKS)
        if dice < 0.15 and chunk not in self.chunks and not self._count_taken(chunk):
            self.chunks[chunk] = False
            backups.add_slots(Tier.PEER, self._slots(chunk))
        elif dice < 0.25 and self.chunks.get(chunk) is False:
            self.chunks[chunk] = True
            backups.retire_slots(Tier.PEER, self._slots(chunk))
        elif dice < 0.28 and chunk in self.chunks:
            self._tear_away(chunk)
        if self.idle.is_due(self.now):
            self._return_idle()
        for leaving in [chunk for chunk, is_leaving in self.chunks.items() if is_leaving]:
            self._empty(leaving)
        if dice > 0.9:
            self._begin(between.bring_nearer(Tier.HOST, Tier.PEER, 2), "nearer")

    def _return_idle(self) -> None:
        """Remove chunks unused for a while at once: they have no needed blocks and no copies in flight."""
        backups = self.loop.relocations.backups
        num_kept = Counter(slot // CHUNK_SLOTS for slot in backups.kept_slots(Tier.PEER))
        uses = {
            LeaseId(str(chunk)): ChunkUse(self.num_copies[chunk], num_kept[chunk])
            for chunk, is_leaving in self.chunks.items()
            if not is_leaving
        }
        for lease_id in self.idle.choose(self.now, uses, backups.is_needed):
            chunk = int(lease_id)
            self.seen["returned with a prefix in it"] += bool(self._count_taken(chunk))
            backups.retire_slots(Tier.PEER, self._slots(chunk))
            assert not self._count_taken(chunk), "something in use was returned"
            self.seen["returned idle"] += 1
            self._remove_memory(chunk)

    def _empty(self, chunk: int) -> None:
        slots = self._slots(chunk)
        if self.random.random() < 0.5:
            self._begin(self.loop.relocations.evacuate(Tier.PEER, slots, Tier.HOST, 2), "evacuated")
        if not self._count_taken(chunk):
            self.seen["emptied"] += 1
            self._remove_memory(chunk)

    def _tear_away(self, chunk: int) -> None:
        """At the deadline the memory is removed first, and the loop is informed afterwards."""
        self.seen["torn away with something in it"] += bool(self._count_taken(chunk))
        self._remove_memory(chunk)
        self.loop.relocations.backups.retire_slots(Tier.PEER, self._slots(chunk))
        self.loop.relocations.abandon(Tier.PEER, self._slots(chunk))

    def _remove_memory(self, chunk: int) -> None:
        del self.chunks[chunk]
        for slot in self._slots(chunk):
            self.executor.slots.pop((Tier.PEER, slot), None)

    # -- copies ------------------------------------------------------------------------------------------------------

    def _begin(self, relocation: Relocation | None, why: str) -> None:
        if relocation is not None:
            self.seen[why] += 1
            self.relocations.append(relocation)

    def _end_copies(self) -> None:
        for transfer in [t for t in self.executor.transfers if self.random.random() < self.speed]:
            self.executor.transfers.remove(transfer)
            self.loop.transfer_done(transfer.transfer_id, self._copy(transfer), self.now)
        for relocation in [r for r in self.relocations if self.random.random() < 0.5]:
            self.relocations.remove(relocation)
            self.loop.relocations.settle(relocation.relocation_id, self._relocate(relocation))

    def _copy(self, transfer: Transfer) -> list[int]:
        is_in = transfer.kind is TransferKind.SWAP_IN
        lost = [
            place
            for place, one in enumerate(transfer.locations)
            if not self._has_memory(one) or (is_in and self._key(one) not in self.executor.slots)
        ]
        self._note_copies(transfer.locations)
        self.executor.copy(transfer, lost)
        self.seen["failed"] += bool(lost)
        return lost

    def _note_copies(self, locations: Iterable[Location]) -> None:
        self.num_copies.update({one.slot // CHUNK_SLOTS for one in locations if one.tier is Tier.PEER})

    def _relocate(self, relocation: Relocation) -> list[int]:
        lost = []
        self._note_copies([*relocation.sources, *relocation.targets])
        for place, (source, target) in enumerate(zip(relocation.sources, relocation.targets, strict=True)):
            is_whole = self._has_memory(target) and self._key(source) in self.executor.slots
            if is_whole:
                self.executor.slots[self._key(target)] = dict(self.executor.slots[self._key(source)])
            else:
                lost.append(place)
        self.seen["moved"] += len(relocation.sources) - len(lost)
        return lost

    def _has_memory(self, location: Location) -> bool:
        return location.tier is Tier.HOST or location.slot // CHUNK_SLOTS in self.chunks

    def _key(self, location: Location) -> tuple[Tier, int]:
        return location.tier, location.slot


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**32), num_host_slots=st.sampled_from([0, 4, 30]))
def test_every_token_is_right_whatever_becomes_of_the_slots(seed: int, num_host_slots: int) -> None:
    Neighbourhood(seed, num_host_slots).run(num_requests=12)


def test_everything_happens_there() -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        world = Neighbourhood(seed, num_host_slots=12)
        world.run(num_requests=20)
        seen += world.seen
    wanted = {
        "nearer", "evacuated", "emptied", "torn away with something in it", "failed", "moved", "returned idle",
        "returned with a prefix in it",
    }  # fmt: skip
    assert wanted <= {name for name, count in seen.items() if count}


CONTROLS = Controls(moves_what_is_read)
CONTROLS.add("memory_goes_before_it_is_empty", SlotLedger, "count_taken", lambda _, ledger, slots: 0)


@CONTROLS.patches()
def what_is_torn_away_is_still_believed_in(patch: pytest.MonkeyPatch) -> None:
    def stale(world: Neighbourhood, location: Location) -> bool:
        world.executor.slots.setdefault((location.tier, location.slot), {i: (i, 5) for i in range(4)})
        return True

    patch.setattr(Relocations, "abandon", lambda between, tier, slots: None)
    patch.setattr(Neighbourhood, "_has_memory", stale)


CONTROLS.add("whatever_lies_in_a_chunk_it_counts_as_idle", BackupTable, "kept_slots", lambda _, backups, tier: set())


@pytest.mark.parametrize("fault", CONTROLS)
def test_a_broken_rule_is_seen(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, InvariantError, KeyError)):
        for seed in (
            89,
            *range(40),
        ):  # one story in a hundred gives a slot away during a read, and overwrites it
            Neighbourhood(seed, num_host_slots=6).run(num_requests=20)
