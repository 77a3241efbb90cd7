"""An engine on its own thread, for asyncio; requests are submitted and aborted between steps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from floodplain.core.errors import PeerLost, ShuttingDown, UserError
from floodplain.core.lifecycle import EndedRequest, Lifecycle, OnFirstToken
from floodplain.core.request import FinishReason, Request, SeqId
from floodplain.engine.build import build_engine
from floodplain.engine.compute_threads import release_compute_threads
from floodplain.engine.config import EngineConfig
from floodplain.engine.outputs import EngineStats, OutputDelta
from floodplain.engine.shell import Engine
from floodplain.engine.watch import EngineWatch
from floodplain.live.rows import LiveView
from floodplain.observe.start_log import StartLog

T = TypeVar("T")

logger = logging.getLogger(__name__)

OnAdded = Callable[[Engine, SeqId], None]
"""Called on the engine's thread when a request is queued, before a step can schedule it."""

_INBOX_S = 0.005
"""Most seconds of inbox work between two steps, so that streams continue while thousands of requests arrive."""


class AsyncEngine:
    """The engine of the server and of in-process benchmarks; submissions and aborts wait for the next step boundary.

    ``engine``: only the engine's thread may use its state once started. ``failure``: the exception that ended the
    engine's thread, which all calls raise; None if none did.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.model_name = engine.model_name
        self.tokenizer = engine.tokenizer
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        engine.has_news = lambda: not self._inbox.empty()
        engine.wake_by_leases(lambda: self._inbox.put(lambda: None))
        self._by_seq: dict[SeqId, Caller] = {}
        self._callers: set[Caller] = set()
        self._pauses: list[Pause] = []
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="new structures")
        self._is_empty = asyncio.Event()
        self._subscribers: list[Callable[[EndedRequest], None]] = []
        self._first_subscribers: list[OnFirstToken] = []
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closing = self._is_draining = False
        self.failure: BaseException | None = None

    @classmethod
    def from_config(cls, config: EngineConfig, start_log: StartLog | None = None) -> AsyncEngine:
        """Load the model and make the engine; ``start`` it on an event loop. ``start_log`` continues an earlier one."""
        return cls(build_engine(config, start_log=start_log))

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output."""
        return self.engine.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.engine.vocab_size

    def stats(self) -> EngineStats:
        """A snapshot of gauges and counters; callable on any thread."""
        return self.engine.stats()

    @property
    def can_serve(self) -> bool:
        """Whether the engine's thread was started and has not failed."""
        return self._thread is not None and self.failure is None

    def watch(self) -> Callable[[], LiveView]:
        """A function that looks at the engine now; it is called on one thread."""
        return EngineWatch(self.engine)

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._callers)

    def subscribe(
        self, on_finished: Callable[[EndedRequest], None], on_first_token: OnFirstToken | None = None
    ) -> None:
        """Call ``on_finished`` on the event loop for every request that ends by ``stop`` or ``length``.

        ``on_first_token`` is called there once for every request whose first token was streamed, aborted later or not.
        """
        self._subscribers.append(on_finished)
        if on_first_token is not None:
            self._first_subscribers.append(on_first_token)

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine's thread, and release the compute threads of the calling thread for it."""
        release_compute_threads()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="floodplain-engine", daemon=True)
        self._thread.start()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and return when none is live; abort those that are live after ``timeout_s``."""
        self._is_draining = True
        self._is_empty.clear() if self._callers else self._is_empty.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_empty.wait(), timeout_s)
        for caller in self._callers:
            self._inbox.put(lambda caller=caller: self._abandon(caller))  # type: ignore[misc]
            caller.deltas.put_nowait(OutputDelta("", (), FinishReason.ABORT.value))

    async def close(self) -> None:
        """Stop after the current step; live requests end with an error."""
        self._is_closing = True
        for pause in self._pauses:
            pause.release()
        if self._thread is not None:
            self._inbox.put(lambda: None)
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        self._fail(self.failure or RuntimeError("the engine is closed"))
        self._compiling.shutdown(wait=False)
        self.engine.close()

    # -- requests --------------------------------------------------------------------------------------------------

    async def generate(
        self, request: Request, *, on_accepted: Callable[[], None] = lambda: None, on_added: OnAdded | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Stream one request. Closing the iterator aborts it: its blocks are free within one step.

        ``on_added``, for a request with KV, is called on the engine's thread before a step can schedule the request,
        and before functions that are posted later; then ``on_accepted`` on the event loop. Raises RequestRefused,
        QueueFull, or ShuttingDown while it drains; UserError if the request's structure cannot be followed.
        """
        if self._loop is None or self.failure is not None or self._is_closing:
            raise RuntimeError("the engine is not running") from self.failure
        if self._is_draining:
            raise ShuttingDown("the server is shutting down: send the request elsewhere")
        caller = Caller(request, self._loop.create_future(), on_added)
        self._callers.add(caller)
        try:
            if request.params.structure is not None and on_added is None:  # a large one takes seconds: no step waits
                check = partial(self.engine.grammars.check, request.params.structure)
                await self._loop.run_in_executor(self._compiling, check)
            self._inbox.put(lambda: self._submit(caller))
            await caller.accepted
            on_accepted()
            delta = await caller.next_delta()
            self._note_first(caller, delta)  # outside the loop: it costs nothing for each token
            while delta.finish_reason is None:
                yield delta
                delta = await caller.next_delta()
            yield delta
        finally:
            self._callers.discard(caller)
            if not self._callers:
                self._is_empty.set()
            self._inbox.put(lambda: self._abandon(caller))

    async def pause(self) -> Pause:
        """Complete all steps and copies, deliver their deltas, and hold the engine's thread until ``Pause.release``."""
        if self._loop is None or self.failure is not None or self._is_closing:
            raise RuntimeError("the engine is not running") from self.failure
        pause = Pause(self._loop)
        self._pauses = [other for other in self._pauses if not other.is_over] + [pause]
        self._inbox.put(lambda: self._hold(pause))
        try:
            await pause.begun
        except BaseException:
            pause.release()
            raise
        return pause

    def post(self, function: Callable[[Engine], object]) -> None:
        """Have ``function`` called with the engine on its thread, between two steps (some may be outstanding)."""
        self._inbox.put(lambda: function(self.engine))

    # -- on the engine's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                self._take_inbox(block_s=self.engine.rest_s)
                if self._is_closing:  # before a step: a pause may have unmapped memory
                    return
                deltas = self.engine.step()
                ended = [one for _, one in self.engine.take_finished() if one.reason is not FinishReason.ABORT]
                if deltas or ended:
                    self._call(self._dispatch, deltas, ended)
        except BaseException as error:  # all exceptions go to the callers: there is no other handler on this thread
            if isinstance(error, PeerLost):
                logger.warning("the engine stops: %s", error)
            else:
                logger.critical("the engine's thread died", exc_info=error)
            self.failure = error
            self._call(self._fail, error)

    def _take_inbox(self, block_s: float) -> None:
        with contextlib.suppress(queue.Empty):
            with self.engine.meter.waiting():
                first = self._inbox.get(timeout=block_s) if block_s else self._inbox.get_nowait()
            first()
            end_s = time.monotonic() + _INBOX_S
            while time.monotonic() < end_s:
                self._inbox.get_nowait()()

    def _hold(self, pause: Pause) -> None:
        deltas = self.engine.come_to_rest()
        self._call(self._dispatch, deltas, [])
        self._call(pause.begin, self.engine)
        with self.engine.meter.waiting():
            pause.hold()

    def _submit(self, caller: Caller) -> None:
        try:
            seq_id = self.engine.add(caller.request)
        except UserError as error:
            self._call(caller.fail, error)
        else:
            caller.seq_id, caller.lifecycle = seq_id, self.engine.loop.state.sequences[seq_id].lifecycle
            if caller.on_added is not None:
                caller.on_added(self.engine, seq_id)
            self._call(self._accept, caller, seq_id)

    def _abandon(self, caller: Caller) -> None:
        if caller.seq_id is not None:
            self.engine.finish(caller.seq_id, FinishReason.ABORT)
            self._call(self._by_seq.pop, caller.seq_id, None)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the event loop is closed, so there are no callers any more
            self._is_closing = True

    # -- on the event loop -----------------------------------------------------------------------------------------

    def _accept(self, caller: Caller, seq_id: SeqId) -> None:
        if not caller.accepted.done():
            self._by_seq[seq_id] = caller
            caller.accepted.set_result(seq_id)

    def _dispatch(self, deltas: list[tuple[SeqId, OutputDelta]], ended: list[EndedRequest]) -> None:
        for seq_id, delta in deltas:
            caller = self._by_seq.get(seq_id)
            if caller is not None:
                caller.deltas.put_nowait(delta)
                if delta.finish_reason is not None:
                    del self._by_seq[seq_id]
        for one in ended:
            for callback in self._subscribers:
                callback(one)

    def _note_first(self, caller: Caller, delta: OutputDelta) -> None:
        if delta.token_ids and caller.lifecycle is not None:
            for callback in self._first_subscribers:
                callback(caller.request, caller.lifecycle)

    def _fail(self, error: BaseException) -> None:
        for pause in self._pauses:
            pause.fail(error)
        for caller in self._callers:
            caller.fail(RuntimeError(f"the engine failed: {error}"))
        self._by_seq.clear()


@dataclass(eq=False, slots=True)
class Caller:
    """The caller of one ``AsyncEngine.generate``. ``accepted`` is done when the engine has accepted or refused it.

    ``seq_id`` is of the engine's thread, ``deltas`` of the event loop: the results, or why the engine ended.
    ``lifecycle`` is the sequence's, set with ``seq_id``, and only read.
    """

    request: Request
    accepted: asyncio.Future[SeqId]
    on_added: OnAdded | None
    seq_id: SeqId | None = None
    lifecycle: Lifecycle | None = None
    deltas: asyncio.Queue[OutputDelta | BaseException] = field(default_factory=asyncio.Queue)

    async def next_delta(self) -> OutputDelta:
        """The next result; raises the exception that ended the engine."""
        delta = await self.deltas.get()
        if isinstance(delta, BaseException):
            raise delta
        return delta

    def fail(self, error: Exception) -> None:
        """Raise ``error`` in the caller: its request was refused, or the engine has ended."""
        if self.accepted.done():
            self.deltas.put_nowait(error)
        else:
            self.accepted.set_exception(error)


class Pause:
    """Holds an engine's thread between two steps, where it runs given functions. ``begun`` is done when it is held."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.begun: asyncio.Future[Engine] = loop.create_future()
        self.is_over = False
        self._loop = loop
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    async def run(self, function: Callable[[Engine], T]) -> T:
        """Call ``function`` with the engine on its thread; return its result or raise its exception here."""
        engine, result = await self.begun, self._loop.create_future()

        def work() -> None:
            try:
                value = function(engine)
            except BaseException as error:
                self._loop.call_soon_threadsafe(settle, result, error, None)
            else:
                self._loop.call_soon_threadsafe(settle, result, None, value)

        self._work.put(work)
        return cast(T, await result)

    def release(self) -> None:
        """Let the engine's thread continue. Safe to call twice."""
        self.is_over = True
        self._work.put(None)

    def begin(self, engine: Engine) -> None:
        """Note that the engine's thread is held now; called on the event loop."""
        if not self.begun.done():
            self.begun.set_result(engine)

    def fail(self, error: BaseException) -> None:
        """Note that the engine's thread has failed and will never be held; called on the event loop."""
        settle(self.begun, RuntimeError(f"the engine failed: {error}"), None)

    def hold(self) -> None:
        """Run given functions until ``release``; called on the engine's thread."""
        while (work := self._work.get()) is not None:
            work()


def settle(future: asyncio.Future[Any], error: BaseException | None, value: Any) -> None:
    """End a future with an error or else a value, on its event loop; no-op if it was cancelled."""
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
