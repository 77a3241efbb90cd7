"""Requests of a load, in the form that a loop in virtual time takes."""

from __future__ import annotations

from collections.abc import Iterable

from floodplain.core.errors import RequestRefused
from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.sim.serving import VirtualDevice
from floodplain.workload.records import LoadRequest


def to_request(asked: LoadRequest) -> Request:
    """Return the request. Its output ends by length, because no step samples a token that could end it."""
    return Request(
        request_id=asked.request_id,
        prompt_token_ids=asked.prompt_token_ids,
        params=SamplingParams(temperature=0.0, max_tokens=asked.max_tokens, ignore_eos=True),
        arrival_s=asked.arrival_s,
    )


def servable(requests: Iterable[Request], device: VirtualDevice) -> tuple[list[Request], str | None]:
    """Return (requests that the device can serve at all, why the first of the others cannot be)."""
    loop = device.make_loop(FcfsPolicy(), seed=0)
    taken, error = [], None
    for request in requests:
        try:
            loop.check(request)
            taken.append(request)
        except RequestRefused as refusal:
            error = error or str(refusal)
    return taken, error
