"""Our own state of vLLM's requests."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING

from floodplain.core.backups import Backup
from floodplain.core.request import OrderKey, SeqId
from floodplain.core.served import RequestAccount, weighted_work

if TYPE_CHECKING:
    from vllm.v1.request import Request


SPARE_ENTRIES = 64
"""Entries of ended requests are dropped if they are more than this, and than live requests."""


class TrackedRequest:
    """One live request.

    Attributes:
        seq_id: Its name in decisions, numbered in order of arrival.
        request: vLLM's own; read only.
        order_key: (priority, arrival in monotonic seconds, id).
        account: Of its request; the request's choices share it (``core.served``).
        entered_step: The step in which it last entered the device.
        first_token_s: When it got its first token; None before. ``last_token_s``: its last.
        num_seen_tokens: Output tokens that it had then.
        backups: Of its leading full blocks, one each (``SwapBooks``).
        rest: Of all others, by (group, place in the block table); released when the request runs again.
        num_kept_tokens: The leading tokens for which ``backups`` and ``rest`` are.
        is_away: Its KV is in swap space, and on the device as far as inbound copies have restored it.
        num_leaving: Its blocks that outbound copies still read.
        num_local_tokens: Leading tokens on the device at vLLM's last call of ``get_num_new_matched_tokens``.
        num_cached_tokens: Tokens of its prompt that were not computed, because they were cached or kept at first.
        session: Its number in ``runtime.sessions``; None if sessions are not kept.
        has_drafts: Whether vLLM speculates. Then no two steps of it are outstanding when one is planned, and all that
            it may get from the outstanding one, but for one token, are drafts.
    """

    __slots__ = (
        "account", "backups", "entered_step", "first_token_s", "has_drafts", "is_away", "last_token_s",
        "num_cached_tokens", "num_kept_tokens", "num_leaving", "num_local_tokens", "num_seen_tokens", "order_key",
        "request", "rest", "seq_id", "session",
    )  # fmt: skip

    def __init__(self, seq_id: SeqId, request: Request, credit: float, arrival_s: float) -> None:
        self.seq_id = seq_id
        self.request = request
        self.order_key: OrderKey = (request.priority, arrival_s, seq_id)
        self.account: RequestAccount[TrackedRequest] = RequestAccount(seq_id, request.priority, self, credit)
        self.entered_step = 0
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.num_seen_tokens = 0
        self.backups: list[Backup] = []
        self.rest: dict[tuple[int, int], Backup] = {}
        self.num_kept_tokens = 0
        self.is_away = False
        self.num_leaving = 0
        self.num_local_tokens = self.num_cached_tokens = 0
        self.session: int | None = None
        self.has_drafts = False

    @property
    def num_unverified_tokens(self) -> int:
        """Return the draft tokens in outstanding steps, each of which may turn out wrong."""
        num_outstanding: int = self.request.num_output_placeholders
        return max(0, num_outstanding - 1) if self.has_drafts else 0

    @property
    def num_verified_tokens(self) -> int:
        """Return the number of leading tokens with KV that stays right, whichever drafts are rejected."""
        num_tokens: int = self.request.num_computed_tokens - self.num_unverified_tokens
        return num_tokens

    @property
    def num_expected_tokens(self) -> int:
        """Return the number of known tokens and of those that outstanding steps generate, however few they verify."""
        num_outstanding: int = self.request.num_output_placeholders - self.num_unverified_tokens
        return int(self.request.num_tokens) + num_outstanding

    def note_tokens(self, now: float) -> int:
        """Record the time of output tokens; return how many more there are than before.

        The answer to a further part of a streamed input begins again at no tokens; the one before becomes credit.
        """
        num_tokens: int = self.request.num_output_tokens
        if num_tokens < self.num_seen_tokens:
            self.account.credit += weighted_work(0, self.num_seen_tokens, self.request.priority)
            self.num_seen_tokens = 0
        num_more, self.num_seen_tokens = num_tokens - self.num_seen_tokens, num_tokens
        if num_more:
            self.last_token_s = now
            self.first_token_s = now if self.first_token_s is None else self.first_token_s
        return num_more

    def note_local(self, num_tokens: int) -> None:
        """Record how many leading tokens vLLM found on the device before admission."""
        self.num_local_tokens = num_tokens
        if not self.request.num_preemptions:
            self.num_cached_tokens = num_tokens

    def note_restored(self, num_tokens: int) -> None:
        """Record that its leading ``num_tokens`` are not computed: they are on the device, or being restored."""
        if not self.request.num_preemptions:
            self.num_cached_tokens = num_tokens

    @property
    def has_kv(self) -> bool:
        """Whether anything of it is in swap space, or on its way there."""
        return bool(self.backups or self.rest)

    @property
    def known_backups(self) -> list[Backup]:
        """Return all copies of it, in the order of its tokens."""
        return [*self.backups, *self.rest.values()]

    @property
    def num_generated(self) -> int:
        """Return its output tokens."""
        return int(self.request.num_output_tokens)


def _parent_of(request_id: str) -> str:
    """The name of the request of which this is one of several choices (vLLM's ``ParentRequest``); else ""."""
    index, _, parent = request_id.partition("_")
    return parent if index.isdecimal() else ""


class RequestRoster:
    """All live requests, by vLLM's names.

    ``by_id``: the same by their names in decisions; read only. ``has_drafts``: whether vLLM speculates, for requests
    that arrive from now on.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, TrackedRequest] = {}
        self.by_id: dict[SeqId, TrackedRequest] = {}
        self.has_drafts = False
        self._shared_accounts: dict[str, RequestAccount[TrackedRequest]] = {}
        self._by_work: list[tuple[float, SeqId]] = []  # as at some earlier time
        self._num_arrived = 0
        self._departed: list[TrackedRequest] = []
        self._changed: set[SeqId] = set()

    def __getitem__(self, request_id: str) -> TrackedRequest:
        return self._by_name[request_id]

    def __iter__(self) -> Iterator[TrackedRequest]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, request_id: str) -> TrackedRequest | None:
        """Return a live request; None if it is not alive."""
        return self._by_name.get(request_id)

    def arrive(self, request: Request, arrival_s: float) -> TrackedRequest:
        """Track a request that arrives at ``arrival_s`` (monotonic); its credit is the least work of any live one."""
        tracked = TrackedRequest(SeqId(self._num_arrived), request, self._least_work(), arrival_s)
        tracked.has_drafts = self.has_drafts
        if parent := _parent_of(request.request_id):
            self._share_account(parent, tracked)
        self._note_work(tracked)
        self._num_arrived += 1
        self._by_name[request.request_id] = self.by_id[tracked.seq_id] = tracked
        return tracked

    def _share_account(self, parent: str, tracked: TrackedRequest) -> None:
        account = self._shared_accounts.setdefault(parent, tracked.account)
        if account is not tracked.account:
            tracked.account = account
            account.choices.append(tracked)

    def _note_work(self, tracked: TrackedRequest) -> None:
        if len(self._by_work) > 2 * len(self.by_id) + SPARE_ENTRIES:  # most of them have ended
            self._by_work = [entry for entry in self._by_work if entry[1] in self.by_id]
            heapq.heapify(self._by_work)
        heapq.heappush(self._by_work, (tracked.account.work, tracked.seq_id))

    def _least_work(self) -> float:
        """Return the least ``work`` of live requests. Entries only grow, so only the first can be outdated."""
        heap = self._by_work
        while heap:
            work, seq_id = heap[0]
            one = self.by_id.get(seq_id)
            if one is not None and one.account.work <= work:
                return one.account.work
            if one is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (one.account.work, seq_id))
        return 0.0

    def depart(self, request_id: str) -> TrackedRequest | None:
        """Stop tracking a request that has ended, and return it; None if it was not tracked."""
        tracked = self._by_name.pop(request_id, None)
        if tracked is not None:
            del self.by_id[tracked.seq_id]
            tracked.account.remove(tracked)
            self._changed.update(one.seq_id for one in tracked.account.choices)
            if not tracked.account.choices:
                self._shared_accounts.pop(_parent_of(request_id), None)
            self._departed.append(tracked)
        return tracked

    def take_departed(self) -> list[TrackedRequest]:
        """Return requests that ended since the last call."""
        departed, self._departed = self._departed, []
        return departed

    def take_changed(self) -> set[SeqId]:
        """Return requests of which a further choice ended since the last call: its output stays in their account."""
        changed, self._changed = self._changed, set()
        return changed
