"""Delays between an instance's dials: they double without a life, and are reset after one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from floodplain.cluster.instance.instance import FIRST_DELAY_S, MOST_DELAY_S, Dialer


class Member:
    """A member that is always at rest."""

    async def rest(self) -> None:
        pass


def delays_between(lives: Sequence[bool | None], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The delays after dials: refused connection (None), served life (True), or no life (False)."""
    member: Any = Member()
    dialer, left, waited = Dialer(member, "127.0.0.1", 1, "token", 1.0), list(lives), list[float]()

    async def open_connection(*address: object) -> tuple[Any, Any]:
        if left[0] is None:
            raise ConnectionRefusedError
        return None, None

    async def serve(link: object) -> bool:
        return bool(left[0])

    async def wait_for(awaitable: Any, timeout: float) -> None:
        awaitable.close()
        waited.append(timeout)
        del left[0]
        if not left:
            dialer._is_stopping.set()
        raise TimeoutError

    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    monkeypatch.setattr(asyncio, "wait_for", wait_for)
    monkeypatch.setattr(dialer, "_serve", serve)
    asyncio.run(dialer._dial())
    return waited


@pytest.mark.parametrize("is_taken", [None, False])
def test_waits_double_up_to_a_bound_whatever_the_router_does(
    is_taken: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = delays_between([is_taken] * 12, monkeypatch)
    assert waited == [min(MOST_DELAY_S, FIRST_DELAY_S * 2**number) for number in range(12)]
    assert waited[-1] == MOST_DELAY_S


def test_after_a_life_the_first_wait_is_the_shortest(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = delays_between([None, False, True, None], monkeypatch)
    assert waited == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, FIRST_DELAY_S, 2 * FIRST_DELAY_S]
