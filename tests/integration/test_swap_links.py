"""A real engine learns the cost of its link from its copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.core.tiers import Link, Tier
from floodplain.cost.link import LinkCurve, LinkProfile
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.shell import Engine
from floodplain.memory.host import transfer as host_transfer
from floodplain.memory.host.emulated_link import EmulatedLink
from floodplain.memory.host.transfer import HostTransferEngine
from floodplain.runtime.prices import Links
from tests.support.swapping import BLOCK_BYTES, ImpatientPolicy

pytestmark = pytest.mark.slow
BLOCK_S = 1e-3
"""Seconds for a block on the modelled link: much more than its copy takes."""
FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "kv_memory": 24 * BLOCK_BYTES,
    "swap": "host",
    "swap_memory": 128 * BLOCK_BYTES,
}


@pytest.fixture
def link() -> EmulatedLink:
    curve = LinkCurve(0.0, ((BLOCK_BYTES, BLOCK_BYTES / BLOCK_S),))
    return EmulatedLink(LinkProfile("test", curve, curve, "this test"), scale=1.0)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, link: EmulatedLink) -> Iterator[Engine]:
    """An engine whose policy swaps at any moment, over a link with the right price.

    The copies' clock stands still: only the link takes time, however busy the machine is.
    """
    clock = SimpleNamespace(perf_counter=lambda: 0.0)
    monkeypatch.setattr(host_transfer, "time", clock)
    one = build_engine(EngineConfig(model="dummy:tiny-llama", **FLAGS), ImpatientPolicy())
    executor: Any = one._executor
    tier = executor._swap._tiers[Tier.HOST]
    tier.close()
    executor._swap._tiers[Tier.HOST] = HostTransferEngine(tier._store, tier.slots, link).start()
    one.loop.state.links = Links([Link(Tier.HOST, BLOCK_BYTES / BLOCK_S)], BLOCK_BYTES)
    yield one
    one.close()


def serve(engine: Engine, num_requests: int = 12) -> None:
    for number in range(num_requests):
        prompt = tuple((7 * number + position) % 256 for position in range(40))
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        name = f"{engine.loop.counters.num_steps}-{number}"
        engine.add(Request(request_id=name, prompt_token_ids=prompt, params=params, arrival_s=float(number)))
    while engine.has_unfinished:
        engine.step()


def block_s(engine: Engine) -> float:
    return BLOCK_BYTES / engine.loop.state.links[Tier.HOST].bandwidth


def test_copies_as_priced_change_nothing_and_slow_ones_raise_the_price(engine: Engine, link: EmulatedLink) -> None:
    serve(engine)
    assert engine.loop.counters.preemptions["swap"] > 20
    assert block_s(engine) == pytest.approx(BLOCK_S, rel=0.5)
    link.scale = 0.1  # another process uses the link, too
    serve(engine)
    assert block_s(engine) > 4 * BLOCK_S


def test_every_copy_is_learned_once(engine: Engine) -> None:
    """As many blocks have learned copy times as have moved."""
    heard: list[int] = []
    links = engine.loop.state.links
    learn = links.learn
    links.learn = lambda copied: (heard.append(copied.num_blocks), learn(copied))[1]  # type: ignore[method-assign]
    serve(engine)
    while engine._swap.poll():
        pass
    heard += [copied.num_blocks for copied in engine._swap.take_copy_times()]
    assert sum(heard) * BLOCK_BYTES == sum(engine.stats().swap_bytes.values())


@pytest.mark.parametrize("hardware", [None, "emulated-pcie5"])
def test_what_was_measured_at_the_start_is_not_learned_from(hardware: str | None) -> None:
    """At the start the machine is idle, and the first copies are cold."""
    with closing(build_engine(EngineConfig(model="dummy:tiny-llama", hardware=hardware, **FLAGS))) as engine:
        assert engine._swap.take_copy_times() == []
