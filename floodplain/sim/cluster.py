"""Several instances behind one dispatcher in virtual time: with the engine's loops, ledgers and policies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import count

from floodplain.core.lifecycle import Lifecycle
from floodplain.core.request import Request, SeqId
from floodplain.policy.dispatch import InstanceView, choose_instance
from floodplain.sim.arrivals import Arrivals
from floodplain.sim.environment import Environment
from floodplain.sim.virtual_engine import VirtualEngine


class VirtualCluster:
    """Engines by epoch, and the lifecycles of each request on all its engines.

    ``engines``: engines that accept requests; while there is none, requests wait in the cluster. ``stories``:
    lifecycles of each request, by its id: one for each engine that had it, in order.
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.engines: dict[int, VirtualEngine] = {}
        self.stories: dict[str, list[Lifecycle]] = {}
        self.arrivals: Arrivals | None = None
        self._epochs = count(1)
        self._held: list[Request] = []

    def join(self, engine: VirtualEngine) -> int:
        """Add an engine that accepts requests from now on; returns its epoch."""
        epoch = next(self._epochs)
        self.engines[epoch] = engine
        held, self._held = self._held, []
        for request in held:
            self.submit(request)
        return epoch

    def leave(self, epoch: int) -> VirtualEngine:
        """Remove an engine, which accepts no more requests; returns it."""
        return self.engines.pop(epoch)

    def submit(self, request: Request) -> None:
        """Submit a request to the engine with the highest freeness; it waits here while there is none."""
        num_tokens = len(request.prompt_token_ids) + len(request.known_token_ids)
        block_tokens = next(iter(self.engines.values())).loop.state.ledger.block_tokens if self.engines else 1
        epoch = choose_instance((see(one, engine) for one, engine in self.engines.items()), num_tokens // block_tokens)
        if epoch is None:
            self._held.append(request)
        else:
            engine = self.engines[epoch]
            engine.arrive(request, partial(self.note, request, engine.lifecycles))

    @property
    def is_idle(self) -> bool:
        """Whether all requests have arrived and ended."""
        is_coming = self.arrivals is not None and self.arrivals.has_unsent
        return not (is_coming or self._held or any(one.loop.has_unfinished for one in self.engines.values()))

    def note(self, request: Request, lifecycles: Mapping[SeqId, Lifecycle], seq_id: SeqId) -> None:
        """Add the lifecycle of a request on an engine."""
        self.story_of(request.request_id).append(lifecycles[seq_id])

    def story_of(self, request_id: str) -> list[Lifecycle]:
        """The lifecycles of a request; further ones are added to this list."""
        return self.stories.setdefault(request_id, [])

    def token_times_s(self, request_id: str) -> list[float]:
        """The time of each output token of a request, on all its engines."""
        return [time_s for life in self.stories[request_id] for time_s in life.token_times_s]


def see(epoch: int, engine: VirtualEngine) -> InstanceView:
    """The dispatcher's view of an engine."""
    state = engine.loop.state
    block_tokens = state.ledger.block_tokens
    tokens = [len(seq.tokens) for seq in state.sequences.values()]
    tokens += [len(request.prompt_token_ids) + len(request.known_token_ids) for request in engine.unseen]
    demands = [-(-num_tokens // block_tokens) for num_tokens in tokens]
    return InstanceView(epoch, state.ledger.num_blocks, sum(demands), len(demands))
