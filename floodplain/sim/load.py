"""The requests of a scenario, made one by one: only their arrivals and lengths are kept."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from heapq import merge

import numpy as np

from floodplain.core.errors import UserError
from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.sim.scenario import Scenario
from floodplain.workload.spec import build_rows, prefix_block_tokens
from floodplain.workload.traces import TraceRow, load_trace

_OWN_TOKENS = 2**31
"""Token ids from here on are of one request only."""


class Load:
    """Requests in order of arrival, equal each time, with made-up tokens: equal ones only where ``prefix_ids`` say so.

    ``scenario``: its workload, or that of each of its tenants. ``rows``: in place of its workload.

    ``num_skipped``: rows of traces that could not be replayed; None without a trace.

    UserError if a file cannot be read, or there is no request.
    """

    def __init__(self, scenario: Scenario, rows: Sequence[TraceRow] | None = None) -> None:
        specs = scenario.tenants if scenario.tenants and rows is None else {"": scenario.workload}
        self.num_skipped: int | None = None
        self._parts: dict[str, _Part] = {}
        for place, (name, spec) in enumerate(specs.items()):
            trace = load_trace(spec.trace) if spec.trace and rows is None else None
            if trace is not None:
                self.num_skipped = (self.num_skipped or 0) + trace.num_skipped
            made = build_rows(spec, trace) if rows is None else rows
            self._parts[name] = _Part(name, place, prefix_block_tokens(spec), made)
        if not len(self):
            raise UserError("workload: there is no request")

    def __len__(self) -> int:
        return sum(len(part.arrivals_s) for part in self._parts.values())

    def __iter__(self) -> Iterator[Request]:
        return (part.make(number) for _, part, number in self._order())

    def ids(self, tenant: str | None = None) -> Iterator[str]:
        """Ids of the requests in order of arrival, of one tenant or of all."""
        return (part.id_of(number) for _, part, number in self._order() if tenant in (None, part.name))

    @property
    def first_s(self) -> float:
        """When the first request arrives."""
        return next(self._order())[0]

    def arrival_of(self, request: Request) -> float:
        """When a request arrives by the workload; it may have been sent later."""
        return self._parts[request.client].arrivals_s[int(request.request_id.rpartition("-")[2])]

    def sample(self, num_requests: int) -> list[Request]:
        """At most so many requests, evenly over the load."""
        chosen = {place * len(self) // num_requests for place in range(min(num_requests, len(self)))}
        return [part.make(number) for place, (_, part, number) in enumerate(self._order()) if place in chosen]

    def _order(self) -> Iterator[tuple[float, _Part, int]]:
        return merge(*(part.arrivals() for part in self._parts.values()), key=lambda arrival: arrival[0])


class _Part:
    """Requests of one load, in columns: 32 bytes each, and their prefixes."""

    def __init__(self, name: str, place: int, block_tokens: int, rows: Sequence[TraceRow]) -> None:
        self.arrivals_s = array("d", (row.arrival_s for row in rows))
        self._prompts = array("q", (row.prompt_tokens for row in rows))
        self._outputs = array("q", (row.output_tokens for row in rows))
        self._prefixes = {number: row.prefix_ids for number, row in enumerate(rows) if row.prefix_ids}
        self._order = np.argsort(self.arrivals_s, kind="stable")
        self.name, self._place, self._block_tokens = name, place, block_tokens

    def arrivals(self) -> Iterator[tuple[float, _Part, int]]:
        for number in map(int, self._order):
            yield self.arrivals_s[number], self, number

    def id_of(self, number: int) -> str:
        return f"{self.name}-{number}" if self.name else str(number)

    def make(self, number: int) -> Request:
        prefixes, own = self._prefixes.get(number, ()), self._place * 2**24 + number
        return Request(
            request_id=self.id_of(number),
            prompt_token_ids=_tokens(self._prompts[number], prefixes, self._block_tokens, own),
            params=SamplingParams(max_tokens=self._outputs[number], ignore_eos=True, temperature=0.0),
            arrival_s=self.arrivals_s[number],
            client=self.name,
        )


def _tokens(num_tokens: int, prefix_ids: Sequence[int], block_tokens: int, number: int) -> tuple[int, ...]:
    """One token for each shared prefix, repeated, and one for the rest: block keys depend on all tokens before."""
    ids = prefix_ids[: -(-num_tokens // block_tokens)]
    shared = sum(((prefix % _OWN_TOKENS,) * block_tokens for prefix in ids), ())[:num_tokens]
    return shared + (_OWN_TOKENS + number,) * (num_tokens - len(shared))
