"""Messages of a bulk transfer: a hello, requests for parts of a store, and chunks with their digests.

A request names a store, a part of it (a layer) and indices in that part (block ids, or numbers of parameter pieces).
Requests are answered in sequence, each in the order of its indices.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from floodplain.cluster.wire.frames import Frame
from floodplain.cluster.wire.stage_link import SECRET_BYTES
from floodplain.core.errors import InvariantError, PeerLost
from floodplain.memory.digest import compute_digests, compute_weights

MAX_CHUNK_BYTES = 16 * 2**20
"""Most bytes of a chunk, and so of one index: a larger one is refused before it is read."""
MAX_REQUEST_INDICES = 2048
"""Most indices of one request; a client splits longer ones."""
YES = b"\x01"

_HELLO = struct.Struct(f"!4s{SECRET_BYTES}s")
_MAGIC = b"FPBK"
HELLO_BYTES = _HELLO.size


@dataclass(frozen=True, slots=True, eq=False)
class BulkRequest:
    """A request for some indices, int64 [num_indices], of a part of a store; its answers repeat its number."""

    number: int
    store: str
    part: int
    indices: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class BulkChunk:
    """The bytes, uint8 [num_bytes], of ``count`` indices of a request from its index ``start`` on, and their digest."""

    number: int
    start: int
    count: int
    digest: int
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class BulkRefusal:
    """Ends the answer to a request: its remaining indices are not sent, for this reason in one line."""

    number: int
    why: str


def pack_hello(secret: bytes) -> bytes:
    """The first bytes of a connection. Raises ``InvariantError`` if the secret is not ``SECRET_BYTES`` long."""
    if len(secret) != SECRET_BYTES:
        raise InvariantError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
    return _HELLO.pack(_MAGIC, secret)


def compute_digest(data: npt.NDArray[np.uint8]) -> int:
    """The digest of bytes, as of a block in swap space, mixed with their number. 1.5 times as fast as CRC-32."""
    num_bytes, num_words = len(data), -(-len(data) // 4)
    if num_bytes % 4:
        data = np.concatenate((data, np.zeros(num_words * 4 - num_bytes, dtype=np.uint8)))
    words = np.ascontiguousarray(data).view(np.int32).reshape(1, num_words)
    weights = _compute_weights(max(num_words - 1, 0).bit_length())[:num_words]
    return int(compute_digests(words, weights)[0]) ^ num_bytes


@lru_cache(maxsize=8)
def _compute_weights(num_bits: int) -> np.ndarray:
    return compute_weights(2**num_bits)


def pack_request(request: BulkRequest) -> Frame:
    """The frame of a request."""
    body = {"request": request.number, "store": request.store, "part": request.part}
    return Frame(body, request.indices)


def read_request(frame: Frame) -> BulkRequest:
    """The request in a frame. Raises ``PeerLost`` if it is malformed."""
    number, part, store = _count(frame, "request"), _count(frame, "part"), frame.body.get("store")
    if not isinstance(store, str) or not 0 < len(frame.integers) <= MAX_REQUEST_INDICES or frame.integers.min() < 0:
        raise PeerLost("a peer asked for what no store can have")
    return BulkRequest(number, store, part, frame.integers)


def pack_answer(answer: BulkChunk | BulkRefusal) -> Frame:
    """The frame of an answer."""
    if isinstance(answer, BulkRefusal):
        return Frame({"request": answer.number, "refused": answer.why})
    body = {"request": answer.number, "start": answer.start, "count": answer.count, "digest": answer.digest}
    return Frame(body, data=answer.data)


def read_answer(frame: Frame) -> BulkChunk | BulkRefusal:
    """The answer in a frame. Raises ``PeerLost`` if it is malformed."""
    number, why, digest = _count(frame, "request"), frame.body.get("refused"), frame.body.get("digest")
    if isinstance(why, str):
        return BulkRefusal(number, why)
    if type(digest) is not int:
        raise PeerLost("a peer sent a chunk without a digest")
    return BulkChunk(number, _count(frame, "start"), _count(frame, "count"), digest, frame.data)


def _count(frame: Frame, name: str) -> int:
    value: Any = frame.body.get(name)
    if type(value) is not int or not 0 <= value < 2**62:
        raise PeerLost(f"a peer sent no {name!r} in a frame of a bulk transfer")
    return value
