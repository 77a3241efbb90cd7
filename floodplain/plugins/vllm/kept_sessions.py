"""Keeps KV of ended requests in swap space for the next request of their session, as our own engine does.

``runtime.sessions`` finds which requests follow each other, and for how long their KV is worth its slots. A session's
name is vLLM's ``session_id``; a tenant is a ``cache_salt``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from floodplain.plugins.vllm.books import SwapBooks
from floodplain.plugins.vllm.tally import SwapTally
from floodplain.plugins.vllm.tracked import TrackedRequest
from floodplain.runtime.sessions import SessionBook


class KeptSessions:
    """The sessions of one engine, and the pins of their KV. ``books`` are of swap space, by content."""

    def __init__(self, books: SwapBooks, block_tokens: int) -> None:
        self.book = SessionBook(books.backups)
        self._books, self._block_tokens = books, block_tokens
        self._counted: dict[str, int] = {}

    def arrive(self, one: TrackedRequest, now: float) -> None:
        """Note a new request, of which only the prompt is known."""
        request = one.request
        one.session = self.book.arrive(request.session_id or "", request.cache_salt or "", request.block_hashes, now)

    def start(self, one: TrackedRequest, now: float) -> None:
        """Note that a request computes: the gap of its session has ended. Later calls do nothing."""
        if one.session is not None:
            self.book.start(one.session, now)

    def end(self, one: TrackedRequest, table: Sequence[Any], now: float, least_chance: float) -> None:
        """Note that a request has ended; pin the contents of its full blocks, and copy those without a copy.

        ``table`` has its blocks, which it still holds; ``now`` is monotonic seconds; ``least_chance`` of a further
        request of the session, for a copy to be worth its time.
        """
        if one.session is not None:
            # A step that is outstanding may still write the KV of the last token.
            num_computed = min(one.num_verified_tokens, one.request.num_tokens - 1)
            keys = one.request.block_hashes[: num_computed // self._block_tokens]
            pin = self.book.end(one.session, keys, now, least_chance)
            if pin is not None:
                self._books.save(one, table, pin)

    def give_up(self, one: TrackedRequest) -> None:
        """Note that a request was aborted, or failed: its KV is not kept."""
        if one.session is not None:
            self.book.give_up(one.session)

    def record(self, tally: SwapTally, bytes_per_block: int) -> None:
        """Set metrics: pinned bytes by tier, and what happened since the last call."""
        backups, counts = self._books.backups, self.book.counts
        for tier in backups.slots:
            tally.set("swap_pinned_bytes", tier.value, to=backups.idle.count_pinned(tier) * bytes_per_block)
        totals = {
            "session_returns_total pinned": counts.hits,
            "session_returns_total unpinned": counts.misses,
            "unpinned_blocks_total expired": counts.num_expired_blocks,
            "unpinned_blocks_total evicted": backups.idle.num_unpinned_blocks,
            "restored_prompt_tokens_total": self._books.num_adopted_tokens,
        }
        for name, total in totals.items():
            tally.count(*name.split(), by=total - self._counted.get(name, 0))
        self._counted = totals
