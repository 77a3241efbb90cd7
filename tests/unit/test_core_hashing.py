"""Content keys. The expected values were made with hashlib and struct alone, so they pin the format."""

from __future__ import annotations

import struct
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.hashing import BlockKey, block_key, extend_keys, root_key

TOKENS = st.integers(0, 2**32 - 1)


def test_keys_are_the_same_in_every_process_and_version() -> None:
    root = root_key("smollm2-135m", "tenant")
    assert root.hex() == "e77bd7a122bcb9da6c8fbd973053eb8cca648a465a08d7d6f842296d90c37fa4"
    first = block_key(root, [1, 2, 3, 4])
    assert first.hex() == "ea8de28f98913dcb03a914301df8c2d2b84c737fcb06575fae94f05ec7312b19"
    assert block_key(first, [0, 2**32 - 1]).hex() == "d5c0092218dcc09b118b586e0a37730f5e989de537dfa4e37533cb5ff30b85ea"


@given(fingerprint=st.text(max_size=8), salt=st.text(max_size=8), tokens=st.lists(TOKENS, max_size=6))
def test_a_key_is_blake2b_of_its_parent_and_its_tokens(fingerprint: str, salt: str, tokens: list[int]) -> None:
    root = blake2b(f"{len(fingerprint)}:{fingerprint}{salt}".encode(), digest_size=32).digest()
    assert root_key(fingerprint, salt) == root
    expected = blake2b(root + struct.pack(f"={len(tokens)}I", *tokens), digest_size=32).digest()
    assert block_key(BlockKey(root), tokens) == block_key(BlockKey(root), tuple(tokens)) == expected


@given(st.tuples(st.text(max_size=4), st.text(max_size=4)), st.tuples(st.text(max_size=4), st.text(max_size=4)))
def test_models_and_tenants_never_share(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (root_key(*one) == root_key(*other)) == (one == other)


def test_a_name_cannot_pass_for_another_by_moving_the_border() -> None:
    assert len({root_key("ab", "c"), root_key("a", "bc"), root_key("abc"), root_key("", "abc"), root_key("2:ab")}) == 5


@given(
    tokens=st.lists(st.integers(0, 3), max_size=24),
    others=st.lists(st.integers(0, 3), max_size=24),
    block_tokens=st.integers(1, 5),
)
def test_equal_keys_mean_equal_tokens_up_to_there(tokens: list[int], others: list[int], block_tokens: int) -> None:
    root = root_key("m")
    keys: list[BlockKey] = []
    other_keys: list[BlockKey] = []
    extend_keys(keys, root, tokens, len(tokens) // block_tokens, block_tokens)
    extend_keys(other_keys, root, others, len(others) // block_tokens, block_tokens)
    assert len(set(keys)) == len(keys) == len(tokens) // block_tokens
    for index, (key, other) in enumerate(zip(keys, other_keys, strict=False)):
        end = (index + 1) * block_tokens
        assert (key == other) == (tokens[:end] == others[:end])


@given(tokens=st.lists(TOKENS, min_size=12, max_size=12), cut=st.integers(0, 4))
def test_keys_may_be_extended_piece_by_piece(tokens: list[int], cut: int) -> None:
    at_once: list[BlockKey] = []
    extend_keys(at_once, root_key("m"), tokens, 4, 3)
    in_pieces: list[BlockKey] = []
    extend_keys(in_pieces, root_key("m"), tokens, cut, 3)
    extend_keys(in_pieces, root_key("m"), tokens, 4, 3)
    assert in_pieces == at_once
