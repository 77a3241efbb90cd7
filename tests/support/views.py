"""Views made by hand: a test states only the fields that it is about."""

from __future__ import annotations

from dataclasses import replace

from floodplain.core.request import SeqId
from floodplain.core.sequence import Status
from floodplain.core.tiers import Tier
from floodplain.core.view import Prices, SequenceView, TierView, View

NEVER = 2**62

DECODING = SequenceView(
    seq_id=SeqId(0),
    status=Status.RUNNING,
    order_key=(0, 0.0, 0),
    client="",
    num_prompt=8,
    since_step=100,
    num_tokens=12,
    num_scheduled=11,
    num_blocks=3,
    exclusive_blocks=3,
    is_decoding=True,
    block_due_step=101,
    end_step=NEVER,
    num_cached_tokens=0,
    num_shared_blocks=0,
    num_backed_blocks=0,
    num_restorable_tokens=0,
    entered_step=0,
    last_token_s=0.0,
    credit=0.0,
    parent=SeqId(0),
    num_ended_tokens=0,
    is_leaving=False,
)


def stream(number: int, **fields: object) -> SequenceView:
    """A stream on the device at step 100: prompt 8, four tokens generated, three full blocks with the next token."""
    named = replace(DECODING, seq_id=SeqId(number), parent=SeqId(number), order_key=(0, float(number), number))
    return replace(named, **fields)  # type: ignore[arg-type]


def prompt(number: int, num_tokens: int = 30, num_scheduled: int = 8, **fields: object) -> SequenceView:
    """A request on the device in the middle of its prompt."""
    values: dict[str, object] = {
        "num_prompt": num_tokens,
        "num_tokens": num_tokens,
        "num_scheduled": num_scheduled,
        "num_blocks": -(-num_scheduled // 4),
        "exclusive_blocks": -(-num_scheduled // 4),
        "is_decoding": False,
        "block_due_step": NEVER,
        "last_token_s": None,
    }
    return stream(number, **(values | fields))


def waiting(number: int, num_tokens: int = 8, **fields: object) -> SequenceView:
    """A new request."""
    return prompt(number, num_tokens, 0, **({"status": Status.WAITING} | fields))


def swapped(number: int, **fields: object) -> SequenceView:
    """A stream in swap space: twelve tokens, eleven of which are restored in three blocks."""
    values: dict[str, object] = {
        "status": Status.SWAPPED,
        "num_scheduled": 0,
        "num_blocks": 0,
        "exclusive_blocks": 0,
        "is_decoding": False,
        "num_backed_blocks": 3,
        "num_restorable_tokens": 11,
    }
    return stream(number, **(values | fields))


def loading(number: int, **fields: object) -> SequenceView:
    """The same stream while it loads: its three blocks are allocated."""
    return swapped(number, **({"status": Status.LOADING, "num_blocks": 3} | fields))


def host(**fields: object) -> TierView:
    """A host tier whose copies are nearly free."""
    free: dict[str, object] = {"num_free_slots": 1000, "num_slots": 1000, "block_s": 1e-6, "latency_s": 0.0}
    return TierView(**({"tier": Tier.HOST} | free | fields))  # type: ignore[arg-type]


def make_view(*rows: SequenceView, **fields: object) -> View:
    """A view at step 100, of a pool of 100 blocks of 4; blocks of the rows are taken."""

    def those(status: Status) -> tuple[SequenceView, ...]:
        return tuple(sorted((row for row in rows if row.status is status), key=lambda row: row.order_key))

    waits = those(Status.WAITING)
    num_blocks = fields.get("num_blocks", 100)
    assert isinstance(num_blocks, int)
    values: dict[str, object] = {
        "step": 100,
        "running": those(Status.RUNNING),
        "waiting": waits,
        "num_waiting": len(waits),
        "swapped": those(Status.SWAPPED),
        "loading": those(Status.LOADING),
        "outstanding": frozenset(),
        "num_available_blocks": num_blocks - sum(row.num_blocks for row in rows),
        "num_blocks": num_blocks,
        "block_tokens": 4,
        "max_batched_tokens": 64,
        "max_num_seqs": 64,
        "tiers": (host(),),
        "prices": Prices(),
    }
    values |= fields
    return View(**({"num_empty_blocks": values["num_available_blocks"]} | values))  # type: ignore[arg-type]
