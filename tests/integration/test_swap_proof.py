"""200 requests under all faults at once have the tokens of a calm run.

The model is tiny, random and in fp32: a wrong byte in a context shows in logprobs of later tokens
(test_swap_forged.py). The policy does anything that a view allows. Swap space is too small, its link is slow and uneven
(results are late; in test_swap_late.py the bytes are), every fifth copy fails, bits flip in slots, clients disconnect,
and texts end at stop strings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest

from floodplain import SamplingParams
from floodplain.core.backups import BackupTable
from floodplain.core.idle_backups import Pin
from floodplain.core.lifecycle import EventKind
from floodplain.core.request import Request, SeqId
from floodplain.core.sampling import ANY_OBJECT
from floodplain.core.sequence import Sequence as Seq
from floodplain.core.tiers import Direction, Tier
from floodplain.cost.link import LinkCurve, LinkProfile
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.outputs import EngineStats
from floodplain.memory.digest import SEED
from floodplain.memory.host.emulated_link import EmulatedLink
from floodplain.memory.host.transfer import HostTransferEngine
from floodplain.memory.transfer import BlockCopy, CopyEngine
from tests.support.calm import MODEL, run_calmly
from tests.support.faulty_transfer import FaultyTransferEngine
from tests.support.parity import Reference
from tests.support.swapping import BLOCK_BYTES, ImpatientPolicy, Swapping

pytestmark = pytest.mark.slow

NUM_REQUESTS, NUM_TOKENS = 200, 20
FLAGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_batched_tokens": 37, "max_num_seqs": 37}
DAMAGE_EVERY = 50
"""Of so many inbound copies one reads a damaged slot: most slots that are damaged by chance are never read again."""
STOPS = ["e", "a", "\u00e9"]
"""Strings that random bytes sometimes contain; both runs must stop alike."""
WAYS_TO_CHOOSE: Sequence[dict[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "stop": tuple(STOPS)},
    {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.5,
     "bad_token_ids": ((101,), (97, 98))},
    {"temperature": 1.0, "seed": 7, "min_p": 0.02},
    {"temperature": 0.0, "ignore_eos": False, "structure": ANY_OBJECT},
)  # fmt: skip


class UnevenLink(EmulatedLink):
    """A slow link, at random up to three times as slow."""

    def __init__(self, seed: int) -> None:
        curve = LinkCurve(1e-4, ((BLOCK_BYTES, BLOCK_BYTES / 4e-4),))
        super().__init__(LinkProfile("uneven", curve, curve, "this test"), scale=1.0)
        self._dice = Random(seed)

    def time_s(self, direction: Direction, num_bytes: int) -> float:
        return super().time_s(direction, num_bytes) * self._dice.uniform(1.0, 3.0)


class DamagingTransferEngine(FaultyTransferEngine):
    """Damages the first slot of every ``DAMAGE_EVERY``-th inbound copy before the copy, while ``is_on()``."""

    def __init__(self, engine: CopyEngine[Any], damage: Callable[[int], None], is_on: Callable[[], bool]) -> None:
        super().__init__(engine, failing=range(0, 1_000_000, 5))
        self._damage, self._is_on, self._num_inbound = damage, is_on, 0

    def submit(self, transfer_id: int, copy: BlockCopy) -> None:
        if copy.direction is Direction.INBOUND:
            self._num_inbound += 1
            if self._num_inbound % DAMAGE_EVERY == 0 and self._is_on():
                self._damage(copy.slots[0])
        super().submit(transfer_id, copy)


@dataclass(kw_only=True)
class Storm(Swapping):
    """Requests that arrive one after the other at an engine under all faults.

    Attributes:
        quits: After how many tokens requests are aborted, by their numbers.
    """

    dice: Random
    is_honest: bool = True
    quits: dict[int, int] = field(default_factory=dict)
    lives: dict[SeqId, Seq] = field(default_factory=dict)

    def make_unreliable(self, seed: int) -> None:
        """Swap over an uneven link, on which every fifth copy fails and some read damaged slots."""
        executor: Any = self.engine._executor
        tiers, slots = executor._swap._tiers, self.slots
        old = tiers[Tier.HOST]
        engine = HostTransferEngine(old._store, slots, UnevenLink(seed)).start()
        tiers[Tier.HOST] = DamagingTransferEngine(engine, self._flip, lambda: self.is_honest)
        old.close()

    def add(self, request: Request) -> SeqId:
        seq_id = super().add(request)
        self.lives[seq_id] = self.engine.loop.state.sequences[seq_id]
        return seq_id

    def rage(self, requests: Sequence[Request]) -> EngineStats:
        """Run until no request is live."""
        return self.drive(requests, Storm._strike, self._count_arrivals)

    def _count_arrivals(self) -> int:
        count = 0
        while len(self.engine.loop.state.sequences) + count < 24 and self.dice.random() < 0.5:
            count += 1
        return count

    def _strike(self, step: int) -> None:
        """Abort requests, and flip bits."""
        for seq in list(self.engine.loop.state.sequences.values()):
            if len(self.outputs[seq.seq_id]) >= self.quits.get(seq.seq_id, NUM_TOKENS + 1):
                self.hang_up(seq.seq_id)
        whole = self.whole_slots()
        if not self.is_honest:
            self.slots.words[whole] = 0
            self.slots.digests[whole] = np.int64(SEED)
        elif whole and self.dice.random() < 0.02:
            self._flip(self.dice.choice(whole))

    def _flip(self, slot: int) -> None:
        self.slots.words[slot, self.dice.randrange(2), self.dice.randrange(1024)] ^= 1 << 7

    def num_preempted_in_prompts(self) -> int:
        """Number of requests that were preempted before their first token."""
        count = 0
        for seq in self.lives.values():
            first_s = seq.lifecycle.token_times_s[0] if seq.lifecycle.token_times_s else float("inf")
            count += any(what is EventKind.PREEMPTED and when < first_s for when, what in seq.lifecycle.events)
        return count


@contextmanager
def storm(seed: int, **flags: Any) -> Iterator[Storm]:
    swapping = {"kv_memory": 24 * BLOCK_BYTES, "swap": "host", "swap_memory": 12 * BLOCK_BYTES}
    engine = build_engine(EngineConfig(model=MODEL, **(FLAGS | swapping | flags)))
    try:
        engine.loop.policy = ImpatientPolicy()
        dice = Random(seed)
        one = Storm(
            engine, dice=dice, quits={number: dice.randrange(8) for number in dice.sample(range(NUM_REQUESTS), 12)}
        )
        one.make_unreliable(seed)
        yield one
    finally:
        engine.close()


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Prompts of 1 to 99 tokens, a third of which begin with one of four prefixes.

    Some have stop strings, are sampled by a seed, depend on all of their tokens so far, or are JSON.
    """
    dice = Random(11)
    prefixes = [tuple(dice.randrange(256) for _ in range(48)) for _ in range(4)]
    made = []
    for index in range(NUM_REQUESTS):
        prompt = tuple(dice.randrange(256) for _ in range(dice.randrange(1, 52)))
        params = SamplingParams(
            **{"max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 2}
            | WAYS_TO_CHOOSE[index % len(WAYS_TO_CHOOSE)]
        )
        prompt = dice.choice(prefixes) + prompt if index % 3 == 0 else prompt
        made.append(Request(request_id=str(index), prompt_token_ids=prompt, params=params, arrival_s=float(index)))
    return made


@pytest.fixture(scope="module")
def expected(requests: list[Request]) -> list[Reference]:
    """The answers of an engine with room for all requests."""
    references = run_calmly(requests, **FLAGS)
    assert len({len(reference.token_ids) for reference in references}) > 3, "no request stops at a string"
    return references


@pytest.mark.parametrize(("caches", "pins"), [(True, False), (False, False), (True, True)])
def test_tokens_are_those_of_a_calm_run(
    caches: bool, pins: bool, requests: list[Request], expected: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pins each request that ends is pinned, whatever copies cost on this machine."""
    pinned: list[Pin] = []
    pin = BackupTable.pin

    def pin_noted(backups: BackupTable, one: Pin) -> None:
        pinned.append(one)
        pin(backups, one)

    monkeypatch.setattr(BackupTable, "pin", pin_noted)
    monkeypatch.setattr("floodplain.runtime.state.least_chance_to_save", lambda *_: 0.0)
    with storm(seed=2, enable_prefix_caching=caches, pin_sessions=pins) as one:
        stats = one.rage(requests)
        backups = one.engine.loop.state.backups
        verdict = one.verdict(expected)
        print(
            len(pinned),
            stats.unpinned_blocks,
            verdict,
            stats.preemptions,
            stats.swap_bytes,
            stats.failed_transfers,
            stats.num_requests,
        )
        assert verdict.is_equal, verdict
        assert any(one.outputs[seq_id] for seq_id in one.aborted), "no aborted request had begun"
        assert stats.preemptions["swap"] > 100
        assert stats.preemptions["recompute"] > 10
        assert one.num_refusals > 10, "swap space was large enough"
        assert one.num_preempted_in_prompts() > 10
        assert min(stats.swap_bytes.values()) > 100 * BLOCK_BYTES
        assert stats.backup_bytes > 10 * BLOCK_BYTES
        assert stats.failed_transfers["not_copied"] > 10
        assert stats.failed_transfers["digest_mismatch"] > 3
        assert stats.num_requests["abort"] == len(one.aborted) > 3
        assert stats.num_requests["stop"] > 3
        assert (stats.num_cached_tokens > 0) is caches
        assert caches or backups.num_idle(Tier.HOST) == 0
        assert (len(pinned) > 10) is pins
        assert (stats.unpinned_blocks["evicted"] > 0) is pins


def test_zeroed_blocks_are_noticed(requests: list[Request], expected: list[Reference]) -> None:
    """Negative control: zeros with digests that match. For smaller mistakes see test_swap_forged.py."""
    with storm(seed=2) as one:
        one.is_honest = False
        one.rage(requests[:60])
        assert len(one.verdict(expected[:60]).wrong) > 10
