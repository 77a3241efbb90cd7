"""Server-sent events, cut out of a stream of bytes."""

from __future__ import annotations

import pytest

from floodplain.web.events import EventTooLong, SseParser

EVENTS = ["{}", "", '{"a": "\u6cb3"}', "x" * 40, "two\nlines"]
STREAM = "".join(f"data: {one.replace(chr(10), chr(10) + 'data:')}\n\n: ping\n\n" for one in EVENTS).encode()


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_events_are_the_same_however_the_stream_is_cut(size: int, end: bytes) -> None:
    parser, stream = SseParser(1000), STREAM.replace(b"\n", end) + b"event: other" + end + b"data: half"
    assert [event for at in range(0, len(stream), size) for event in parser.feed(stream[at : at + size])] == EVENTS
    assert parser.close() == ["half"]


def test_lines_of_an_event_are_joined_each_without_its_first_space() -> None:
    parser, parts = SseParser(100), (b"data:a\r", b"\ndata:  b\r\n\r", b"\n")
    assert [event for part in parts for event in parser.feed(part)] == ["a\n b"]


@pytest.mark.parametrize("piece", [b"x" * 2**8, b"data: " + b"x" * 2**8 + b"\n"])
def test_a_line_or_an_event_without_an_end_is_held_in_bounded_memory(piece: bytes) -> None:
    parser = SseParser(2**14)
    with pytest.raises(EventTooLong):
        for _ in range(2**14 // 2**8 + 2):
            parser.feed(piece)


def test_a_long_line_in_many_pieces_is_joined_once() -> None:
    class Counting(bytes):
        def __contains__(self, key: object) -> bool:
            searched.append(len(self))
            return bytes.__contains__(self, key)  # type: ignore[operator]

    searched: list[int] = []
    parser, piece = SseParser(2**20), Counting(b"x" * 100)
    assert not any(parser.feed(piece) for _ in range(1000))
    assert parser.feed(Counting(b"\n")) == [] and sum(searched) <= 2 * 100_001
