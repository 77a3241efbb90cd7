"""What engines in virtual time share: a step loop, its requests, and those who listen to its steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from floodplain.core.free_blocks import BlockId
from floodplain.core.lifecycle import Lifecycle
from floodplain.core.plan import StepPlan, StepResult
from floodplain.core.request import Request, SeqId
from floodplain.runtime.driver import StepDriver
from floodplain.runtime.handover import adopt
from floodplain.runtime.loop import Loop
from floodplain.sim.environment import Environment
from floodplain.sim.links import VirtualLinks

DUMMY_TOKEN = 0
"""The token that every step samples. Requests end by ``max_tokens``; only prompts make contents differ."""


def dummy_result(plan: StepPlan) -> StepResult:
    """One ``DUMMY_TOKEN`` for each sequence that a plan samples."""
    return StepResult(plan.step_id, [DUMMY_TOKEN] * len(plan.sampled))


class VirtualEngine(ABC):
    """A step loop beside other events.

    Attributes:
        links: To swap space; none without it.
        lifecycles: Lifecycles of the requests, in order of submission; with ``on_ended``, of those live here only.
        on_step: Called with each plan and the time of its start.
        on_ended: Called with the requests that a step has ended.
    """

    def __init__(self, environment: Environment, loop: Loop, links: VirtualLinks) -> None:
        self.loop, self.links = loop, links
        self.lifecycles: dict[SeqId, Lifecycle] = {}
        self.on_step: Callable[[StepPlan, float], None] | None = None
        self.on_ended: Callable[[Sequence[Request]], object] | None = None
        self._requests: dict[SeqId, Request] = {}
        self._environment = environment
        self._driver = StepDriver(loop)

    @property
    def stall_s(self) -> float:
        """Time in which requests were live, copies under way, and nothing could run."""
        return self._driver.stall_s

    @property
    def unseen(self) -> Sequence[Request]:
        """Requests that have arrived and are not submitted to the loop yet."""
        return ()

    def submit(self, request: Request) -> SeqId:
        """Submit a request that arrives now and computes all of its known tokens."""
        seq_id = self._take(request)
        self.advance()
        return seq_id

    def adopt(self, request: Request, blocks: Sequence[BlockId], num_computed: int) -> SeqId:
        """Resume a request from KV in ``blocks``, which were held for it; if it may not run, it is recomputed."""
        seq_id = self._take(request)
        adopt(self.loop, seq_id, blocks, num_computed, self._environment.now)
        self.advance()
        return seq_id

    @abstractmethod
    def arrive(self, request: Request, then: Callable[[SeqId], object]) -> None:
        """Submit a request that arrives now as soon as the loop can see it, and call ``then`` with its id."""

    @abstractmethod
    def pause(self, then: Callable[[], object]) -> None:
        """Stop planning for good, and call ``then`` when no step and no copy is outstanding."""

    @abstractmethod
    def advance(self) -> None:
        """Plan what can be planned now."""

    def forget(self) -> None:
        """Drop what is kept of the requests that have left for other engines."""
        self.lifecycles.clear()
        self._requests.clear()

    def _take(self, request: Request) -> SeqId:
        seq_id = self.loop.submit(request)
        self.lifecycles[seq_id] = self.loop.state.sequences[seq_id].lifecycle
        if self.on_ended is not None:
            self._requests[seq_id] = request
        return seq_id

    def _complete(self, plan: StepPlan) -> None:
        outputs = self._driver.complete(dummy_result(plan), self._environment.now)
        if outputs.finished and self.on_ended is not None:
            for seq_id in outputs.finished:
                del self.lifecycles[seq_id]
            self.on_ended([self._requests.pop(seq_id) for seq_id in outputs.finished])
