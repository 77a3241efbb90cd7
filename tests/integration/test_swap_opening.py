"""Opening and closing swap space: how large it is, what is refused, and that no failure leaves anything behind."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from floodplain.core.errors import UserError
from floodplain.core.tiers import Tier
from floodplain.cost.link import LINKS
from floodplain.engine import build, swap
from floodplain.engine.build import build_engine
from floodplain.engine.config import HARDWARE, EngineConfig
from floodplain.engine.shell import Engine
from tests.support.swapping import BLOCK_BYTES

KV_BYTES = 24 * BLOCK_BYTES


def build_tiny(**flags: Any) -> Engine:
    options: dict[str, Any] = {"dtype": "float32", "kv_memory": KV_BYTES, "max_model_len": 128, "swap": "host"}
    return build_engine(EngineConfig(model="dummy:tiny-llama", **(options | flags)))


def num_copy_threads() -> int:
    return sum(thread.name.startswith("copy-") for thread in threading.enumerate())


def num_slots(engine: Engine) -> int:
    return engine.loop.state.backups.slots[Tier.HOST].num_slots


@pytest.mark.parametrize(
    ("available", "asked", "slots"),
    [
        (2**40, None, 8 * 24),  # eight pools
        (64 * BLOCK_BYTES, None, 10),  # a quarter of what the pool leaves
        (2**40, 7 * BLOCK_BYTES, 7),
        (2**40, 8 * BLOCK_BYTES - 1, 7),
        (33 * BLOCK_BYTES, 9 * BLOCK_BYTES, 9),
    ],
)
def test_its_size_is_as_requested_or_follows_the_pool_and_the_machine(
    available: int, asked: int | None, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap, "available_bytes", lambda: available)
    engine = build_tiny(swap_memory=asked)
    assert num_slots(engine) == slots
    assert engine.config.swap_memory == slots * BLOCK_BYTES
    engine.close()


def test_where_the_pool_lies_in_the_same_memory_it_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "MOST_DEFAULT_CPU_BYTES", 30 * BLOCK_BYTES)
    for asked, slots in ((None, 30), (40 * BLOCK_BYTES, 40)):
        engine = build_tiny(swap_memory=asked)
        assert num_slots(engine) == slots
        engine.close()


@pytest.mark.parametrize(
    ("available", "asked", "message"),
    [
        (
            2**30 + KV_BYTES,
            2**30 + 1,
            "--swap-memory 1073741825B is more than the 1 GiB that this machine has free",
        ),
        (2**30, BLOCK_BYTES - 1, "--swap-memory 8191B is less than one KV block of 8 KiB: raise it"),
        (3 * BLOCK_BYTES + KV_BYTES, None, "--swap-memory 6KiB is less than one KV block of 8 KiB: raise it"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(
    available: int, asked: int | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap, "available_bytes", lambda: available)
    with pytest.raises(UserError, match=message) as caught:
        build_tiny(swap_memory=asked)
    assert "\n" not in str(caught.value)
    assert num_copy_threads() == 0


@pytest.mark.parametrize("part", [(build, "Loop"), (swap, "_describe_link")])
def test_a_failure_after_it_was_opened_ends_its_threads(part: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fail(*args: object) -> None:
        seen.append(num_copy_threads())
        raise UserError("no")

    monkeypatch.setattr(*part, fail)
    with pytest.raises(UserError, match=r"^no$"):
        build_tiny()
    assert seen == [2]
    assert num_copy_threads() == 0


def test_the_loop_has_the_cost_of_a_copy_and_the_size_of_a_block() -> None:
    engine = build_tiny()
    (facts,) = engine.links
    assert engine.loop.state.config.block_bytes == BLOCK_BYTES
    assert engine.loop.state.links[Tier.HOST].bandwidth == facts["bandwidth"] > 1e6
    engine.close()


def test_emulated_links_of_one_process_are_slowed_by_one_factor() -> None:
    slowdowns = set()
    for name in HARDWARE:
        engine = build_tiny(hardware=name)
        (facts,) = engine.links
        link, profile = engine.loop.state.links[Tier.HOST], LINKS[name.removeprefix("emulated-")]
        modelled = min(curve.points[-1][1] for curve in (profile.outbound, profile.inbound))
        assert (facts["name"], facts["modelled_bandwidth"]) == (name, modelled)
        assert link.bandwidth == pytest.approx(modelled / facts["slowdown"])
        assert link.latency_s == pytest.approx(profile.inbound.latency_s * facts["slowdown"])
        slowdowns.add(facts["slowdown"])
        engine.close()
    assert len(slowdowns) == 1


def test_without_swap_space_nothing_is_opened(caplog: pytest.LogCaptureFixture) -> None:
    engine = build_tiny(swap="none", policy="paced")
    assert "with --swap none it serves by arrival" in caplog.text
    assert (engine.links, engine.loop.state.backups.slots, num_copy_threads()) == ((), {}, 0)
    assert (engine.config.swap_memory, engine.stats().swap_bytes) == (None, {})
    engine.close()


def test_without_swap_space_timely_still_chooses_admissions(caplog: pytest.LogCaptureFixture) -> None:
    build_tiny(swap="none", policy="timely").close()
    assert "with --swap none it chooses who begins" in caplog.text


def test_fcfs_without_swap_space_logs_no_hint(caplog: pytest.LogCaptureFixture) -> None:
    build_tiny(swap="none", policy="fcfs").close()
    assert "--swap none" not in caplog.text


def test_a_flag_that_changes_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    build_tiny(policy="fcfs", pace=5.0).close()
    assert "--pace changes nothing under --policy fcfs" in caplog.text
