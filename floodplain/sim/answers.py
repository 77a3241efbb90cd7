"""What became of the requests of a fleet: a record and a lifecycle of each, or only sums over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from floodplain.core.errors import InvariantError
from floodplain.core.lifecycle import EventKind, Lifecycle
from floodplain.core.request import Request
from floodplain.observe.load_table import GapHistogram, LoadTable
from floodplain.observe.result import EngineReport, RunInfo, benchmark_result, summary_result
from floodplain.sim.load import Load
from floodplain.workload.records import RequestRecord

Timeline = Mapping[str, Sequence[float]]


class EachAnswer:
    """Keeps the token times of every request.

    ``records``: by request id. ``lives``: by request id, those of all instances joined; without refused requests.
    """

    def __init__(self, load: Load) -> None:
        self.records: dict[str, RequestRecord] = {}
        self.lives: dict[str, Lifecycle] = {}
        self._load = load

    def note(self, request: Request, lives: Sequence[Lifecycle], error: str | None) -> None:
        """Take in an ended request with its lifecycles, one for each instance that had it, or why it was refused."""
        self.records[request.request_id] = record_of(request, self._load.arrival_of(request), lives, error)
        if lives:
            self.lives[request.request_id] = _joined(lives)

    def result(self, info: RunInfo, engine: EngineReport | None = None, timeline: Timeline | None = None) -> Any:
        """The benchmark result of all requests. InvariantError if one was not answered."""
        _check_answered(len(self.records), self._load)
        return benchmark_result([self.records[name] for name in self._load.ids()], info, engine, timeline)

    def result_of(self, tenant: str, info: RunInfo) -> Any:
        """The benchmark result of the requests of one API key."""
        return benchmark_result([self.records[name] for name in self._load.ids(tenant)], info)

    def lives_in_order(self) -> list[Lifecycle]:
        """Lifecycles of the requests that were not refused, in order of arrival."""
        return [self.lives[name] for name in self._load.ids() if name in self.lives]


class SummedAnswers:
    """As ``EachAnswer``, but keeps 48 bytes of each request, and 48 more for its tenant, beside its row in the load."""

    def __init__(self, load: Load, tenants: Sequence[str]) -> None:
        self._load = load
        self._all = LoadTable(GapHistogram(), load.first_s)
        self._by_tenant = {name: LoadTable(GapHistogram(), load.first_s) for name in tenants}

    def note(self, request: Request, lives: Sequence[Lifecycle], error: str | None) -> None:  # noqa: D102
        record = record_of(request, self._load.arrival_of(request), lives, error)
        self._all.add(record)
        if request.client in self._by_tenant:
            self._by_tenant[request.client].add(record)

    def result(self, info: RunInfo, engine: EngineReport | None = None, timeline: Timeline | None = None) -> Any:  # noqa: D102
        _check_answered(self._all.num_requests, self._load)
        return summary_result(self._all, info, engine, timeline)

    def result_of(self, tenant: str, info: RunInfo) -> Any:  # noqa: D102
        return summary_result(self._by_tenant[tenant], info)


Answers = EachAnswer | SummedAnswers


def _check_answered(num_answered: int, load: Load) -> None:
    if num_answered != len(load):
        raise InvariantError(f"{len(load) - num_answered} of {len(load)} requests were not answered")


def record_of(request: Request, due_s: float, lives: Sequence[Lifecycle], error: str | None) -> RequestRecord:
    """A client's record of a request that was to be sent at ``due_s``: its lifecycles, or why it was refused."""
    times = tuple(when for life in lives for when in life.token_times_s)
    sent_s = lives[0].arrival_s if lives else due_s
    return RequestRecord(
        request_id=request.request_id,
        prompt_tokens=len(request.prompt_token_ids),
        arrival_s=due_s,
        sent_s=sent_s,
        finished_s=times[-1] if times else sent_s,
        token_times_s=times,
        output_token_ids=None,
        text="",
        error=error,
    )


def _joined(lives: Sequence[Lifecycle]) -> Lifecycle:
    """One lifecycle of a request that several instances had, one after the other."""
    joined = Lifecycle(lives[0].arrival_s)
    for life in lives:
        joined.events += [event for event in life.events if event[1] is not EventKind.ARRIVED]
        joined.token_times_s += life.token_times_s
    joined.num_cached_tokens = lives[0].num_cached_tokens
    return joined
