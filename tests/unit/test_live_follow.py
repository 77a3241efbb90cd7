"""Messages of a feed, cut out of a stream of bytes."""

from __future__ import annotations

import pytest

from floodplain.live.follow import take_messages

MESSAGES = ["{}", "", '{"a": "\u6cb3"}', "x" * 40]
STREAM = "".join(f"data: {one}\n\n" for one in MESSAGES).encode()


class CountingBuffer(bytearray):
    """Counts the bytes that are searched."""

    num_searched = 0

    def find(self, sub: bytes, start: int = 0) -> int:  # type: ignore[override]
        found = super().find(sub, start)
        self.num_searched += (found if found >= 0 else len(self)) - start
        return found


@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_messages_are_the_same_however_the_stream_is_cut(size: int) -> None:
    pending, stream = bytearray(), STREAM + b"data: half"
    found = [one for at in range(0, len(stream), size) for one in take_messages(pending, stream[at : at + size])]
    assert found == MESSAGES and pending == b"data: half"


def test_a_long_message_is_searched_once() -> None:
    pending = CountingBuffer()
    for _ in range(1000):
        assert list(take_messages(pending, b"x" * 100)) == []
    assert list(take_messages(pending, b"\n\n")) == ["x" * 100_000]
    assert pending.num_searched <= 2 * 100_000
