from __future__ import annotations

from itertools import product

import pytest

from floodplain.core.errors import InvariantError
from floodplain.core.hashing import block_key, root_key
from floodplain.core.request import SeqId
from floodplain.core.sequence import Sequence, Status
from tests.support.loops import make_request

LEGAL = {
    "waiting": {"loading", "running", "finished"},
    "running": {"waiting", "swapped", "finished"},
    "swapped": {"loading", "running", "waiting", "finished"},
    "loading": {"running", "swapped", "waiting", "finished"},
    "finished": set(),
}


def make_sequence(num_prompt: int = 5, max_total: int = 9) -> Sequence:
    request = make_request("r", tuple(range(num_prompt)), arrival_s=3.0, min_tokens=2)
    return Sequence(SeqId(4), request, root=root_key("m"), max_total=max_total, stop_ids=frozenset())


@pytest.mark.parametrize(("source", "target"), list(product(Status, Status)))
def test_a_sequence_makes_the_moves_of_the_table_and_no_other(source: Status, target: Status) -> None:
    seq = make_sequence()
    seq.status = source
    if target.value in LEGAL[source.value]:
        seq.move_to(target)
        assert seq.status is target
    else:
        with pytest.raises(InvariantError, match=f"sequence 4 cannot go from {source.value} to {target.value}"):
            seq.move_to(target)
        assert seq.status is source


def test_expected_tokens_are_those_known_and_those_on_the_way() -> None:
    seq = make_sequence(num_prompt=5, max_total=7)
    assert seq.num_expected == 5
    seq.num_sampling = 2
    assert seq.num_expected == 7


def test_order_is_priority_then_arrival_then_id() -> None:
    seq = make_sequence()
    assert seq.order_key == (0, 3.0, 4)
    assert seq.min_total == 7


def test_keys_cover_full_blocks_of_known_tokens_and_are_made_once() -> None:
    seq = make_sequence(num_prompt=5)
    first = block_key(seq.root, (0, 1))
    assert seq.keys_for(1, 2) == [first]
    assert seq.keys_for(2, 2) == [first, block_key(first, (2, 3))]
    assert seq.keys_for(1, 2) == [first]
    assert seq.keys_for(0, 2) == []


def test_forget_blocks_drops_the_blocks_of_a_sequence_and_no_token() -> None:
    seq = make_sequence()
    seq.tokens.append(8)
    seq.num_computed = seq.num_scheduled = 5
    seq.is_decoding = True
    seq.forget_blocks()
    assert (seq.blocks, seq.num_computed, seq.num_scheduled, seq.is_decoding) == ([], 0, 0, False)
    assert seq.tokens[seq.num_prompt :] == [8]
