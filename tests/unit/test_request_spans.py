from __future__ import annotations

import pytest

from floodplain.core.lifecycle import CopiedKV, EndedRequest, EventKind, Lifecycle, residence_s
from floodplain.core.plan import Transfer, TransferKind
from floodplain.core.request import FinishReason, Request, SeqId
from floodplain.core.sampling import SamplingParams
from floodplain.core.tiers import Location, Tier
from floodplain.engine.copy_log import CopyLog
from floodplain.server.request_spans import root_span, spans_of

REQUEST = Request(request_id="r", prompt_token_ids=(1, 2, 3), params=SamplingParams(max_tokens=7), arrival_s=10.0)


def ended(events: list[tuple[float, EventKind]], tokens: list[float], *copies: CopiedKV) -> EndedRequest:
    life = Lifecycle(10.0, token_times_s=tokens)
    for now, kind in events:
        life.record(kind, now)
    return EndedRequest(REQUEST, life, FinishReason.LENGTH, copies)


SWAPPED = ended(
    [
        (11.0, EventKind.SCHEDULED),
        (14.0, EventKind.PREEMPTED),
        (17.0, EventKind.SWAPPED_IN),
        (18.0, EventKind.PREEMPTED),
        (19.0, EventKind.SCHEDULED),
        (21.0, EventKind.FINISHED),
    ],
    [13.0, 17.5, 21.0],
    CopiedKV(TransferKind.SWAP_OUT, Tier.HOST, 100, 14.0, 15.0),
    CopiedKV(TransferKind.SWAP_IN, Tier.HOST, 100, 16.0, 17.0),
)


def test_phases_preemptions_and_copies_are_spans() -> None:
    found = [(span.name, span.begin_s, span.end_s, dict(span.attributes)) for span in spans_of(SWAPPED)]
    assert found == [
        ("queue", 10.0, 11.0, {}),
        ("prefill", 11.0, 13.0, {}),
        ("decode", 13.0, 21.0, {}),
        ("preempted", 14.0, 17.0, {"floodplain.preemption.resumed_by": "swap"}),
        ("preempted", 18.0, 19.0, {"floodplain.preemption.resumed_by": "recompute"}),
        ("swap_out", 14.0, 15.0, {"floodplain.swap.bytes": 100, "floodplain.swap.tier": "host"}),
        ("swap_in", 16.0, 17.0, {"floodplain.swap.bytes": 100, "floodplain.swap.tier": "host"}),
    ]


def test_a_request_is_either_queued_on_the_device_or_preempted() -> None:
    spans = list(spans_of(SWAPPED))
    off_s = sum(span.end_s - span.begin_s for span in spans if span.name in ("queue", "preempted"))
    on_s = sum(end - begin for begin, end in residence_s(SWAPPED.lifecycle))
    root = root_span(SWAPPED, "m")
    assert off_s + on_s == root.end_s - root.begin_s
    assert all(root.begin_s <= span.begin_s <= span.end_s <= root.end_s for span in spans)


def test_the_root_has_the_attributes_of_vllm() -> None:
    assert dict(root_span(SWAPPED, "m").attributes) == {
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.request.id": "r",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.latency.time_in_queue": 1.0,
        "gen_ai.latency.time_to_first_token": 3.0,
        "gen_ai.latency.e2e": 11.0,
        "gen_ai.latency.time_in_model_prefill": 2.0,
        "gen_ai.latency.time_in_model_decode": 8.0,
        "gen_ai.latency.time_in_model_inference": 10.0,
    }


def test_what_a_router_does_not_know_is_left_out() -> None:
    """A router has token times, and no events of the instance."""
    routed = ended([(14.0, EventKind.FINISHED)], [13.0, 14.0])
    assert [span.name for span in spans_of(routed)] == ["decode"]
    assert "gen_ai.latency.time_in_queue" not in root_span(routed, "m").attributes


# -- the log of copies -------------------------------------------------------------------------------------------------


def transfer(number: int, seq_id: int | None, *tiers: Tier, kind: TransferKind = TransferKind.SWAP_OUT) -> Transfer:
    locations = tuple(Location(tier, slot) for slot, tier in enumerate(tiers))
    blocks = tuple(range(len(tiers)))
    return Transfer(number, kind, None if seq_id is None else SeqId(seq_id), blocks, locations)  # type: ignore[arg-type]


def test_copies_are_recorded_by_request_and_tier_from_order_to_end() -> None:
    log = CopyLog(block_bytes=10)
    log.begin([transfer(1, 5, Tier.PEER, Tier.HOST, Tier.HOST), transfer(2, 6, Tier.HOST)], 1.0)
    log.begin([transfer(3, 5, Tier.HOST, kind=TransferKind.SWAP_IN)], 2.0)
    log.end([3, 1], 4.0)
    assert log.take(SeqId(5)) == (
        CopiedKV(TransferKind.SWAP_IN, Tier.HOST, 10, 2.0, 4.0),
        CopiedKV(TransferKind.SWAP_OUT, Tier.PEER, 10, 1.0, 4.0),
        CopiedKV(TransferKind.SWAP_OUT, Tier.HOST, 20, 1.0, 4.0),
    )


@pytest.mark.parametrize("seq_id", [5, None])
def test_nothing_is_kept_of_ended_requests_and_of_prefixes(seq_id: int | None) -> None:
    log = CopyLog(block_bytes=10)
    log.begin([transfer(1, seq_id, Tier.HOST)], 1.0)
    assert log.take(SeqId(5)) == ()
    log.end([1], 2.0)
    assert log.take(SeqId(5)) == ()
    assert not log._begun and not log._ended
