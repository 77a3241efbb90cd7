"""A lender over a fake engine and on a fake GPU, and limits on lending from an engine's flags."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import UserError
from floodplain.engine.config import EngineConfig
from floodplain.engine.pool_limits import SteadyState, find_limits
from floodplain.leases.messages import Heartbeat, Join, Offer, Recall
from floodplain.leases.rows import Member, Reply
from floodplain.leases.states import Lease, LeaseId, LeaseState, Outcome
from floodplain.lending.lent_pool import LentPool, PoolLimits, open_lent_pool
from floodplain.lending.membership import LentDevice, Membership
from floodplain.lending.neighbours import default_device_name
from floodplain.lending.pool_lender import LOAD_LOOK_S, PoolLender
from floodplain.memory.cuda import backend as cuda_backend
from floodplain.memory.cuda.backend import CudaBackend
from floodplain.memory.host.backend import HostBackend
from floodplain.memory.host.device import HostDevice, open_private_device
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.memory.host.named_file import NAME
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.model.network.config import ModelConfig
from floodplain.model.weights.open_model import open_model
from floodplain.policy.lending import PoolLoad
from tests.support.lending import WildPolicy

FULL, STEP = 1000, 64


class FakeEngine:
    """An engine of 1,000 one-byte blocks that shrinks and grows by at most 64 at a time."""

    full_bytes = FULL
    quantum_bytes = 4
    block_bytes = 1

    def __init__(self) -> None:
        self.own_bytes = FULL
        self.told: list[tuple[str, int]] = []
        self.num_reports = 0
        self.refuses = False

    def report(self, now: float) -> PoolLoad:
        self.num_reports += 1
        return PoolLoad(now, 0, 0, self.own_bytes, FULL, 0)

    def give_way(self, to_bytes: int) -> None:
        self.told.append(("give", to_bytes))
        self.own_bytes = max(to_bytes, self.own_bytes - STEP)

    def take_back(self, to_bytes: int) -> None:
        self.told.append(("take", to_bytes))
        if not self.refuses:
            self.own_bytes = min(to_bytes, self.own_bytes + STEP)


class World:
    """A lender over a fake engine; a test plays the coordinator."""

    def __init__(self, targets: list[int], num_looks: int = 10**9, guest_bytes: int = 0) -> None:
        self.engine = FakeEngine()
        device = LentDevice(capacity_bytes=FULL, foreign_bytes=lambda: 0)
        self.membership = Membership("a", "life", device, clock=lambda: 0.0)
        self.policy = WildPolicy(targets, num_looks)
        self.lender = PoolLender(self.engine, self.policy, self.membership, lambda: True, LOAD_LOOK_S, guest_bytes)
        self.now = 0.0

    def tell(self, offered_bytes: int, revision: int, *leases: Lease) -> None:
        """Answer all messages with this row and these leases."""
        row = Member("a", "life", revision=revision, offered_bytes=offered_bytes)
        messages, sent_s = self.membership.collect()
        replies = [Reply(Outcome.APPLIED, row, leases) for _ in messages]
        self.membership.learn(messages, replies, 10.0, sent_s + revision)

    def says(self) -> list[object]:
        """The messages to send, except joins and heartbeats."""
        return [message for message in self.membership.collect()[0] if not isinstance(message, Heartbeat | Join)]

    def run(self, seconds: float = 0.02, num_boundaries: int = 1) -> None:
        for _ in range(num_boundaries):
            self.now += seconds
            self.lender.at_boundary(self.now)


def test_bytes_are_offered_only_when_the_pool_has_shrunk_by_them() -> None:
    world = World([300])
    world.tell(0, 1)
    for num_boundaries in range(1, 6):
        world.run()
        assert world.engine.own_bytes == FULL - min(300, num_boundaries * STEP)
        assert world.says() == [Offer("a", world.membership._side.stamp, FULL - world.engine.own_bytes)]
    world.run()
    assert world.engine.own_bytes == 700
    assert not world.lender.is_moving


def test_guests_bytes_beside_their_leases_shrink_the_pool_unoffered() -> None:
    world = World([300], guest_bytes=100)
    world.tell(0, 1)
    world.run()
    assert (world.engine.own_bytes, world.says()) == (FULL - STEP, []), "not enough for a guest yet"
    world.run(num_boundaries=6)
    assert world.engine.own_bytes == 700
    assert world.says() == [Offer("a", world.membership._side.stamp, 200)]


def test_bytes_are_recalled_at_once_and_taken_back_as_they_are_freed() -> None:
    world = World([300])
    world.tell(0, 1)
    world.run(num_boundaries=8)
    lease = Lease(LeaseId("l"), 1, "a", "b", 200, 1, LeaseState.HELD, held_bytes=200)
    world.tell(300, 2, lease)
    world.policy._targets = [0]
    world.run(0.06)
    assert isinstance(world.says()[0], Recall)
    assert world.engine.own_bytes == 700, "until it is told that it may"
    world.tell(200, 3, lease)
    world.run(num_boundaries=6)
    assert world.engine.own_bytes == 800
    assert ("take", 800) in world.engine.told
    world.tell(0, 4)
    world.run(num_boundaries=6)
    assert world.engine.own_bytes == FULL


def test_refused_bytes_are_requested_again_but_not_at_every_boundary() -> None:
    world = World([300])
    world.tell(0, 1)
    world.run(num_boundaries=8)
    world.engine.refuses = True
    world.policy._targets = [0]
    world.engine.told.clear()
    world.run(0.001, num_boundaries=2000)
    assert 3 <= len(world.engine.told) <= 6
    assert not world.lender.is_moving
    world.engine.refuses = False
    world.run(1.0)
    assert world.lender.is_moving


def test_a_boundary_with_nothing_to_do_only_looks_at_the_clock() -> None:
    world = World([0])
    world.tell(0, 1)
    world.run()
    num_reports = world.engine.num_reports
    lender = world.lender
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    lender.at_boundary(world.now)
    sys.setprofile(None)
    assert called == ["at_boundary"]
    assert world.engine.num_reports == num_reports
    world.run(1.0)
    assert world.engine.num_reports == num_reports + 1
    assert world.engine.told == []


def test_before_it_has_joined_it_keeps_what_it_has() -> None:
    world = World([0])
    world.engine.own_bytes = 600
    world.run(num_boundaries=10)
    assert world.engine.own_bytes == 600, "an engine before it may have lent the rest"
    world.tell(0, 1)
    world.run(num_boundaries=10)
    assert world.engine.own_bytes == FULL


def test_default_names_are_names_and_never_the_same() -> None:
    names = {default_device_name() for _ in range(20)}
    assert len(names) == 20
    assert all(NAME.fullmatch(name) for name in names)


# -- what the flags allow ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    config = open_model("dummy:tiny-llama", 0).config
    assert config.shape.max_position == 2048
    return config


def limits(model: ModelConfig, lend: str, max_model_len: int | None = None, num_blocks: int = 64) -> PoolLimits:
    config = EngineConfig(model="m", coordinator="http://x", lend=lend, max_model_len=max_model_len)
    return find_limits(config, model, num_blocks, 8192)


@pytest.mark.parametrize(
    ("lend", "max_model_len", "expected"),
    [
        ("off", None, PoolLimits(64, 64, 0, 1024)),
        ("auto", None, PoolLimits(64, 32, 32, 512)),
        ("auto", 100, PoolLimits(64, 7, 57, 100)),
        ("auto", 1024, PoolLimits(64, 64, 0, 1024)),
        ("128KiB", None, PoolLimits(64, 48, 16, 768)),
        ("128KiB", 100, PoolLimits(64, 7, 16, 100)),
    ],
)
def test_the_longest_request_fits_into_the_smallest_pool(
    lend: str, max_model_len: int | None, expected: PoolLimits, model: ModelConfig
) -> None:
    assert limits(model, lend, max_model_len) == expected


@pytest.mark.parametrize(
    ("lend", "max_model_len", "message"),
    [
        ("128KiB", 769, r"^--max-model-len 769 does not fit: the KV pool holds 768 tokens beside --lend 128KiB; "),
        ("auto", 1025, r"^--max-model-len 1025 does not fit: the KV pool holds 1024 tokens beside --lend auto; raise"),
        ("512KiB", None, r"^the KV pool holds 0 tokens while it lends, too few .*raise --kv-memory, or lower --lend$"),
        ("1GiB", 10, r"^--max-model-len 10 does not fit: the KV pool holds 0 tokens beside --lend 1GiB; raise"),
        ("8191", None, r"^--lend 8191 is less than one KV block of 8 KiB: raise it$"),
    ],
)
def test_what_does_not_fit_beside_what_is_lent_is_bad_input(
    lend: str, max_model_len: int | None, message: str, model: ModelConfig
) -> None:
    with pytest.raises(UserError, match=message):
        limits(model, lend, max_model_len)


def test_one_line_is_logged_if_requests_must_be_shorter(model: ModelConfig, caplog: pytest.LogCaptureFixture) -> None:
    limits(model, "auto")
    assert caplog.messages == [
        "max_model_len is lowered from 2048 to 512 tokens: the KV pool holds no more while it lends"
    ]


@pytest.mark.parametrize(
    ("num_free", "max_model_len", "expected"),
    [
        (16, None, PoolLimits(64, 48, 16, 768)),
        (48, None, PoolLimits(64, 32, 32, 512)),
        (100, None, PoolLimits(64, 32, 32, 512)),
        (0, None, PoolLimits(64, 64, 0, 1024)),
        (16, 100, PoolLimits(64, 7, 16, 100)),
        (64, 1024, PoolLimits(64, 64, 0, 1024)),
    ],
)
def test_no_more_is_lent_than_a_profile_leaves_free(
    num_free: int, max_model_len: int | None, expected: PoolLimits, model: ModelConfig
) -> None:
    config = EngineConfig(model="m", coordinator="http://x", lend="auto", max_model_len=max_model_len, profile="p.json")
    assert find_limits(config, model, 64, 8192, SteadyState(2.5, 0, num_free * 8192 + 8191)) == expected


# -- a fake GPU --------------------------------------------------------------------------------------------------------


LAYOUT = KVLayout(num_layers=2, block_tokens=16, num_kv_heads=2, head_dim=128, dtype=torch.float32)
UUID = b"u" * 16


@pytest.fixture
def pool() -> Iterator[Any]:
    with open_private_device(2**23) as device:
        pool = KVPool(device, LAYOUT, 16)
        ledger = BlockLedger(0, LAYOUT.block_tokens, quantum_blocks=pool.quantum_blocks)
        pool.grow(ledger, 16)
        yield pool, SimpleNamespace(state=SimpleNamespace(ledger=ledger))
        pool.close()


GUEST_PAGES = 3
LIMITS = PoolLimits(num_blocks=16, least_blocks=4, most_lent_blocks=8, max_model_len=64)


class FakeCuda:
    """The pool's device on a GPU, which other processes use, too."""

    page_bytes = PAGE_BYTES

    def __init__(self, device: HostDevice) -> None:
        self.device, self.base_pages = device, 0
        self.foreign_pages = 0
        self.kept_bytes: int | None = None

    num_owned_pages = property(lambda self: self.device.num_owned_pages)

    def cap_torch(self, kept_bytes: int) -> None:
        self.kept_bytes = kept_bytes

    def num_foreign_pages(self) -> int:
        return self.foreign_pages - self.base_pages

    def forget_others(self) -> None:
        self.base_pages = self.foreign_pages


def open_on_gpu(pool: Any, patch: pytest.MonkeyPatch) -> tuple[LentPool, FakeCuda, KVPool]:
    kv_pool, loop = pool
    device = FakeCuda(kv_pool.device)
    patch.setattr(kv_pool, "device", device)
    patch.setattr(cuda_backend, "measure_context_bytes", lambda index: GUEST_PAGES * PAGE_BYTES)
    return open_lent_pool(kv_pool, loop, LIMITS, CudaBackend(0)), device, kv_pool


def test_on_a_gpu_memory_is_kept_for_guests_contexts_and_from_torch(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_lent_pool(*pool, LIMITS, HostBackend()).guest_bytes == 0
    lent_pool, device, kv_pool = open_on_gpu(pool, monkeypatch)
    assert lent_pool.guest_bytes == GUEST_PAGES * PAGE_BYTES
    assert device.kept_bytes == lent_pool.full_bytes == kv_pool.num_mapped_pages * PAGE_BYTES


def test_foreign_bytes_count_from_the_first_loan_less_a_guests_context(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent_pool, device, kv_pool = open_on_gpu(pool, monkeypatch)
    device.foreign_pages = 7  # of modules and other processes
    assert lent_pool.foreign_bytes == 0
    pages = kv_pool.unmap_quanta([0])
    device.device.release(pages)
    for num_pages, seen in ((7, 0), (7 + GUEST_PAGES, 0), (7 + GUEST_PAGES + 2, 2), (9, 0)):
        device.foreign_pages = num_pages
        assert lent_pool.foreign_bytes == seen * PAGE_BYTES
