"""The common part of schedules of layers: wait for a layer's KV, compute it, count times and bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.expansion.pie_fifo import PieFifo
from floodplain.core.errors import InvariantError
from floodplain.core.layer_places import LayerPlaces
from floodplain.core.plan import StepPlan
from floodplain.core.request import SeqId
from floodplain.core.tiers import Direction

_ROUNDING_S = 1e-9
"""A copy that is due so soon after a time ends at it: sums of times are not exact, and what starts next depends on
what has ended."""


@dataclass(frozen=True, slots=True)
class LayerLink:
    """The path between the device and the memory that layers stream from.

    Attributes:
        inbound_bandwidth: Bytes per second towards the device, and
        outbound_bandwidth: away from it, while nothing is copied the other way.
        latency_s: Seconds that each copy takes before its first byte.
        shares_duplex: Whether copies of both directions at the same time run at half their speed each.
    """

    inbound_bandwidth: float
    outbound_bandwidth: float
    latency_s: float = 0.0
    shares_duplex: bool = False

    def copy_s(self, direction: Direction, num_bytes: int) -> float:
        """Seconds of one copy that has the link to itself; no bytes take no time."""
        bandwidth = self.inbound_bandwidth if direction is Direction.INBOUND else self.outbound_bandwidth
        return self.latency_s + num_bytes / bandwidth if num_bytes else 0.0


@dataclass(slots=True, eq=False)
class LayerCopy:
    """One copy of a layer, or of rows of it.

    Attributes:
        layer: The layer.
        direction: The direction.
        device_place: The arena or place on the device, by any number, and
        host_place: the one at the other end.
        num_bytes: Bytes of the copy.
        after: Copies that must end before this one begins; cleared when it ends.
        begun_at_s: Start time; None before.
        ended_at_s: End time; None before.
    """

    layer: int
    direction: Direction
    device_place: int
    host_place: int
    num_bytes: int
    after: tuple[LayerCopy, ...] = ()
    begun_at_s: float | None = None
    ended_at_s: float | None = None
    left_s: float = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether every copy in ``after`` has ended."""
        return all(copy.ended_at_s is not None for copy in self.after)


class LayerCopies:
    """Copies under way and their clock. Copies of one direction start in the order of ``enqueue``.

    Args:
        link: Their link.
        on_ended: Called with each copy that ends, in order of time.

    Attributes:
        now: Seconds of virtual time.
    """

    def __init__(self, link: LayerLink, on_ended: Callable[[LayerCopy], None]) -> None:
        self.now = 0.0
        self._link = link
        self._on_ended = on_ended
        self._lines: dict[Direction, deque[LayerCopy]] = {direction: deque() for direction in Direction}

    def enqueue(self, copy: LayerCopy) -> None:
        """Append a copy to the queue of its direction."""
        copy.left_s = self._link.copy_s(copy.direction, copy.num_bytes)
        self._lines[copy.direction].append(copy)
        self._begin_heads()

    def advance(self, until_s: float) -> None:
        """Advance the clock and the copies to ``until_s``."""
        while self._run(until_s):
            pass
        self.now = until_s

    def wait_for(self, copy: LayerCopy) -> None:
        """Advance the clock until ``copy`` has ended.

        Raises:
            InvariantError: It can never end.
        """
        while copy.ended_at_s is None:
            self.wait_for_any()

    def wait_for_any(self) -> None:
        """Advance the clock until the next copy has ended.

        Raises:
            InvariantError: No copy is under way.
        """
        if not self._run(float("inf")):
            raise InvariantError("a layer waits, and no copy is under way")

    def _begin_heads(self) -> list[LayerCopy]:
        """Start the first copy of each queue if it is ready; returns all copies under way."""
        heads = [line[0] for line in self._lines.values() if line and line[0].is_ready]
        for copy in heads:
            if copy.begun_at_s is None:
                copy.begun_at_s = self.now
        return heads

    def _run(self, until_s: float) -> bool:
        """Advance the clock until a copy ends, at most to ``until_s``. True if one ended."""
        heads = self._begin_heads()
        if not heads:
            return False
        slowdown = len(heads) if self._link.shares_duplex else 1
        first = min(heads, key=lambda copy: copy.left_s)
        end_s = self.now + slowdown * first.left_s
        has_ended = end_s <= until_s + _ROUNDING_S
        passed_s = first.left_s if has_ended else (until_s - self.now) / slowdown
        for copy in heads:
            copy.left_s = max(0.0, copy.left_s - passed_s)
        self.now = min(end_s, until_s)
        if has_ended:
            self._end(first)
        return has_ended

    def _end(self, copy: LayerCopy) -> None:
        self._lines[copy.direction].popleft()
        copy.ended_at_s, copy.after = self.now, ()
        self._on_ended(copy)


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The work of one step in each layer. Blocks, and so bytes, are the same in all layers.

    Attributes:
        compute_s: Seconds of each layer.
        read_bytes: KV of one layer that the step reads.
        written_bytes: KV of one layer that the step adds.
        held_bytes: KV of one layer that live requests hold, read in this step or not. Only ``PieLayers`` copies it all.
    """

    compute_s: tuple[float, ...]
    read_bytes: int
    written_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """The times and bytes of one step.

    Attributes:
        duration_s: From its start to the end of its last layer.
        stall_s: Part of it in which a layer waited for its KV.
        inbound_bytes: Bytes of the copies that it enqueued towards the device, and
        outbound_bytes: away from it. The last ones may end in a later step.
    """

    duration_s: float
    stall_s: float
    inbound_bytes: int
    outbound_bytes: int


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """A computation or a copy of one layer, from start to end.

    Attributes:
        layer: The layer.
        direction: Direction of a copy; None for computing.
        device_place: The arena or place on the device.
        host_place: The one at the other end of a copy; None for computing.
        begun_at_s: Start, in seconds of virtual time.
        ended_at_s: End, likewise.
        num_bytes: Bytes of a copy.
    """

    layer: int
    direction: Direction | None
    device_place: int
    host_place: int | None
    begun_at_s: float
    ended_at_s: float
    num_bytes: int = 0


class LayerSchedule(ABC):
    """Back-to-back steps, and copies beside them.

    Args:
        link: The link of the copies.

    Attributes:
        copies: Copies under way, and the clock.
        on_span: Called with each span that has ended, for timelines and checks.
    """

    def __init__(self, link: LayerLink) -> None:
        self.copies = LayerCopies(link, self._on_copied)
        self.on_span: Callable[[LayerSpan], None] | None = None
        self._asked_bytes = dict.fromkeys(Direction, 0)

    def step(self, work: LayerWork) -> StepCost:
        """Compute all layers once."""
        begun_at_s, stall_s = self.copies.now, 0.0
        self._asked_bytes = dict.fromkeys(Direction, 0)
        self._begin_step(work)
        for layer, compute_s in enumerate(work.compute_s):
            asked_at_s = self.copies.now
            self._await_layer(layer, work)
            stall_s += self.copies.now - asked_at_s
            self._compute(layer, compute_s)
            self._end_layer(layer, work)
        asked = self._asked_bytes
        duration_s = self.copies.now - begun_at_s
        return StepCost(duration_s, stall_s, asked[Direction.INBOUND], asked[Direction.OUTBOUND])

    @abstractmethod
    def _begin_step(self, work: LayerWork) -> None:
        """Called before the first layer."""

    @abstractmethod
    def _await_layer(self, layer: int, work: LayerWork) -> None:
        """Advance the clock until all KV of a layer is on the device."""

    @abstractmethod
    def _end_layer(self, layer: int, work: LayerWork) -> None:
        """Called after a layer has computed."""

    @abstractmethod
    def _place_of(self, layer: int) -> int:
        """The device place in which a layer computes."""

    def _compute(self, layer: int, compute_s: float) -> None:
        begun_at_s = self.copies.now
        self.copies.advance(begun_at_s + compute_s)
        if self.on_span is not None:
            self.on_span(LayerSpan(layer, None, self._place_of(layer), None, begun_at_s, self.copies.now))

    def _copy(self, copy: LayerCopy) -> LayerCopy:
        self._asked_bytes[copy.direction] += copy.num_bytes
        self.copies.enqueue(copy)
        return copy

    def _on_copied(self, copy: LayerCopy) -> None:
        if self.on_span is None:
            return
        assert copy.begun_at_s is not None and copy.ended_at_s is not None
        places = (copy.device_place, copy.host_place)
        self.on_span(
            LayerSpan(copy.layer, copy.direction, *places, copy.begun_at_s, copy.ended_at_s, copy.num_bytes),
        )


class AheadLayers(LayerSchedule):
    """Loads streamed layers before they compute: at the start of the step, and after each use of a slot.

    Args:
        places: Which layers stream.
        link: As in ``LayerSchedule``.
    """

    def __init__(self, places: LayerPlaces, link: LayerLink) -> None:
        super().__init__(link)
        self.places = places
        self._loads: dict[int, LayerCopy] = {}  # of this step, by layer
        self._written: dict[int, LayerCopy] = {}  # the last write-through from each slot

    def _begin_step(self, work: LayerWork) -> None:
        for layer in self.places.first:
            self._load(layer, work)

    def _await_layer(self, layer: int, work: LayerWork) -> None:
        if self.places.slot_of(layer) is not None:
            self.copies.wait_for(self._loads[layer])

    def _end_layer(self, layer: int, work: LayerWork) -> None:
        if self.places.slot_of(layer) is None:
            return
        self._write_through(layer, work)
        follower = self.places.follower(layer)
        if follower is not None:
            self._load(follower, work)

    def _write_through(self, layer: int, work: LayerWork) -> None:
        slot = self._place_of(layer)
        written = LayerCopy(layer, Direction.OUTBOUND, slot, layer, work.written_bytes)
        self._written[slot] = self._copy(written)

    def _load(self, layer: int, work: LayerWork) -> None:
        slot = self._place_of(layer)
        load = LayerCopy(layer, Direction.INBOUND, slot, layer, work.read_bytes, self._writes_before(slot))
        self._loads[layer] = self._copy(load)

    def _writes_before(self, slot: int) -> tuple[LayerCopy, ...]:
        """The copies that a load into a slot must follow: the last write-through from it.

        Writes are in order, and the layer's own last write is earlier, since more layers stream than there are slots.
        """
        return (self._written[slot],) if slot in self._written else ()

    def _place_of(self, layer: int) -> int:
        return self.places.arena_of(layer)


class OnDemandLayers(AheadLayers):
    """As ``AheadLayers``, but a streamed layer is loaded only when it must compute (FlexGen's way)."""

    def _begin_step(self, work: LayerWork) -> None:
        """No layer is loaded ahead."""

    def _await_layer(self, layer: int, work: LayerWork) -> None:
        if self.places.slot_of(layer) is not None:
            self._load(layer, work)
            self.copies.wait_for(self._loads[layer])

    def _end_layer(self, layer: int, work: LayerWork) -> None:
        if self.places.slot_of(layer) is not None:
            self._write_through(layer, work)


class PieLayers(LayerSchedule):
    """Whole layers are swapped out and in, one at a time in each direction, as ``pie_fifo`` decides.

    Args:
        fifo: The rule; not shared with another schedule.
        link: As in ``LayerSchedule``.
    """

    def __init__(self, fifo: PieFifo, link: LayerLink) -> None:
        super().__init__(link)
        self.fifo = fifo

    def _begin_step(self, work: LayerWork) -> None:
        """Nothing: swaps start only with layers."""

    def _end_layer(self, layer: int, work: LayerWork) -> None:
        """Nothing: new rows are swapped out with the whole layer."""

    def _await_layer(self, layer: int, work: LayerWork) -> None:
        self._begin_swaps(layer, work)
        while not self.fifo.is_present(layer):
            self.copies.wait_for_any()
            self._begin_swaps(layer, work)

    def _begin_swaps(self, layer: int, work: LayerWork) -> None:
        for swap in self.fifo.begin_layer(layer, self.copies.now):
            self._copy(LayerCopy(swap.layer, swap.direction, swap.gpu_place, swap.cpu_place, work.held_bytes))

    def _on_copied(self, copy: LayerCopy) -> None:
        self.fifo.swap_ended(copy.direction, self.copies.now)
        super()._on_copied(copy)

    def _place_of(self, layer: int) -> int:
        place = self.fifo.table[layer].gpu_place
        assert place is not None
        return place


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Sizes of a model's KV, layer by layer.

    Attributes:
        num_layers: Layers of the model.
        block_tokens: Tokens of a block.
        token_bytes: KV of one token in one layer.
    """

    num_layers: int
    block_tokens: int
    token_bytes: int

    def block_bytes(self, num_tokens: int) -> int:
        """Bytes of one layer's blocks for ``num_tokens`` tokens of a sequence."""
        return -(-num_tokens // self.block_tokens) * self.block_tokens * self.token_bytes


class PlanWork:
    """Computes the work of a loop's plans in each layer; every plan must be passed, in order.

    A shared block is counted for each of its sequences.

    Args:
        shape: The model's shape.
        compute_s: Returns the seconds of a plan, given the bytes of KV that it reads in one layer. They are spread
            evenly over the layers.
    """

    def __init__(self, shape: LayerShape, compute_s: Callable[[StepPlan, int], float]) -> None:
        self._shape = shape
        self._compute_s = compute_s
        self._num_computed: dict[SeqId, int] = {}  # tokens of each resident sequence

    def work_of(self, plan: StepPlan) -> LayerWork:
        """The work of the next plan. Call it once for each plan, in order."""
        for seq_id in (*plan.released, *(preemption.seq_id for preemption in plan.preemptions)):
            self._num_computed.pop(seq_id, None)
        read_bytes = sum(map(self._shape.block_bytes, self._note_batch(plan)))
        return LayerWork(
            compute_s=(self._compute_s(plan, read_bytes) / self._shape.num_layers,) * self._shape.num_layers,
            read_bytes=read_bytes,
            written_bytes=plan.num_tokens * self._shape.token_bytes,
            held_bytes=sum(map(self._shape.block_bytes, self._num_computed.values())),
        )

    def _note_batch(self, plan: StepPlan) -> list[int]:
        """Tokens that each sequence of the batch has in the KV cache before the step."""
        before = [self._num_computed[seq_id] for seq_id in plan.decodes]
        for seq_id in plan.decodes:
            self._num_computed[seq_id] += 1
        for chunk in plan.prefills:
            before.append(chunk.start)
            self._num_computed[chunk.seq_id] = chunk.start + len(chunk.token_ids)
        return before


class LayeredSteps:
    """Times plans by a schedule of layers, as if steps ran back to back.

    Args:
        schedule: The schedule of layers.
        work_of: Returns the work of a plan in a layer.

    Attributes:
        costs: Costs of all steps that computed.
    """

    def __init__(self, schedule: LayerSchedule, work_of: Callable[[StepPlan], LayerWork]) -> None:
        self.costs: list[StepCost] = []
        self._schedule = schedule
        self._work_of = work_of

    def time_s(self, plan: StepPlan) -> float:
        """Seconds of one plan; 0 for one that only moves KV."""
        work = self._work_of(plan)
        if not plan.num_tokens:
            return 0.0
        self.costs.append(self._schedule.step(work))
        return self.costs[-1].duration_s
