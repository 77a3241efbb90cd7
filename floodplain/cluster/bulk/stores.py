"""Stores that peers may read, by name. A store is withdrawn only when no read of it is under way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from floodplain.cluster.bulk.wire import MAX_CHUNK_BYTES
from floodplain.core.errors import InvariantError


class NotServed(LookupError):
    """A store does not have what was requested, or no store has this name (any more)."""


class Store(Protocol):
    """Memory that peers read. ``read`` is called on several threads at once."""

    def read(self, part: int, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """The bytes of some indices of a part, index after index: uint8, of any shape.

        Args:
            part: 0 or more; from a peer, not checked further.
            indices: int64 [num_indices], 0 or more; from a peer, not checked further.

        Raises:
            NotServed: The store does not have all of them. Any other ``LookupError`` means the same.
        """
        ...


class ServedStore:
    """A store while it is served: from ``serve`` to ``withdraw``.

    Attributes:
        name: Its name.
        index_bytes: Most bytes of one index.
    """

    def __init__(self, name: str, store: Store, index_bytes: int) -> None:
        self.name, self.index_bytes = name, index_bytes
        self._store = store
        self._changed = threading.Condition()
        self._num_reads, self._is_open = 0, True

    def read(self, part: int, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """The bytes of some indices: uint8 [num_bytes], which stay valid after ``end``.

        Raises:
            NotServed: The store does not have all of them, or was withdrawn.
        """
        with self._reading():
            try:
                data = self._store.read(part, indices)
            except LookupError as error:
                raise NotServed(str(error) or f"store {self.name!r} refused the indices") from None
            if data.dtype != np.uint8 or data.nbytes > self.index_bytes * len(indices):
                raise InvariantError(f"store {self.name!r} gave {data.nbytes} bytes of {data.dtype}")
            # an array over memory that is not its own may be unmapped once the read has ended
            return data.reshape(-1) if data.flags.owndata else data.reshape(-1).copy()

    def end(self) -> None:
        """Refuse further reads, and return when none is under way."""
        with self._changed:
            self._is_open = False
            self._changed.wait_for(lambda: not self._num_reads)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._changed:
            if not self._is_open:
                raise NotServed(f"store {self.name!r} was withdrawn")
            self._num_reads += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_reads -= 1
                self._changed.notify_all()


class StoreTable:
    """Stores by name. Every method may be called on any thread."""

    def __init__(self) -> None:
        self._stores: dict[str, ServedStore] = {}
        self._lock = threading.Lock()

    def serve(self, name: str, store: Store, index_bytes: int) -> None:
        """Let peers read a store.

        Raises:
            InvariantError: The name is taken, or one index has more bytes than a chunk may have.
        """
        if not 0 < index_bytes <= MAX_CHUNK_BYTES:
            raise InvariantError(f"an index has 1 to {MAX_CHUNK_BYTES} bytes, not {index_bytes}")
        with self._lock:
            if name in self._stores:
                raise InvariantError(f"store {name!r} is served already")
            self._stores[name] = ServedStore(name, store, index_bytes)

    def withdraw(self, name: str) -> None:
        """End a store; return when no read of it is under way. Does nothing if there is none of this name."""
        with self._lock:
            served = self._stores.pop(name, None)
        if served is not None:
            served.end()

    def find(self, name: str) -> ServedStore:
        """The store of a name.

        Raises:
            NotServed: There is none.
        """
        with self._lock:
            served = self._stores.get(name)
        if served is None:
            raise NotServed(f"no store {name!r} is served")
        return served
