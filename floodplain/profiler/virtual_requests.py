"""Requests of a load, as a loop in virtual time takes them."""

from __future__ import annotations

from collections.abc import Iterable

from floodplain.core.errors import RequestRefused
from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.sim.serving import VirtualDevice
from floodplain.workload.records import LoadRequest


def to_request(asked: LoadRequest) -> Request:
    """Outputs end by their length: no step samples anything that could end them."""
    return Request(
        request_id=asked.request_id,
        prompt_token_ids=asked.prompt_token_ids,
        params=SamplingParams(temperature=0.0, max_tokens=asked.max_tokens, ignore_eos=True),
        arrival_s=asked.arrival_s,
    )


def servable(requests: Iterable[Request], device: VirtualDevice) -> tuple[list[Request], str | None]:
    """(requests that the device can serve at all, why the first of the others cannot)."""
    loop = device.make_loop(FcfsPolicy(), seed=0)
    taken, error = [], None
    for request in requests:
        try:
            loop.check(request)
            taken.append(request)
        except RequestRefused as refusal:
            error = error or str(refusal)
    return taken, error
