"""The content of each place, from the record of a schedule: an oracle that uses no rule of any schedule.

The KV of a layer has a version: how often the layer has computed. A copy takes the content of its source as it begins;
until it ends, its destination is empty.
"""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.expansion.pie_fifo import PieFifo
from floodplain.core.layer_places import LayerPlaces
from floodplain.core.tiers import Direction
from tests.support.layer_steps import LayerSpan

Place = tuple[str, int]
Content = tuple[int, int]
"""A layer, and the version of its KV."""


class Fault(AssertionError):
    """A layer computed on wrong bytes, or bytes were lost."""


class Bytes:
    """The contents of all places.

    Args:
        contents: Contents before the first step; other places are empty.
        copies_rows: Whether outbound copies contain only rows added since the last one.
    """

    def __init__(self, num_layers: int, contents: dict[Place, Content], *, copies_rows: bool) -> None:
        self.versions = [0] * num_layers
        self.contents = dict(contents)
        self.copies_rows = copies_rows
        self._users: dict[Place, list[LayerSpan]] = {}
        self._taken: dict[int, Content] = {}  # the content of each copy in flight, by the id of its span

    def replay(self, spans: Iterable[LayerSpan]) -> None:
        """Replay all spans in the order of time. At one moment, ends precede begins.

        Raises:
            Fault: With the violation, and its time.
        """
        events: list[tuple[float, int, int, int, LayerSpan]] = []
        for order, span in enumerate(spans):
            takes_time = span.ended_at_s > span.begun_at_s
            events.append((span.begun_at_s, 2 if takes_time else 1, order, 0, span))
            events.append((span.ended_at_s, 0 if takes_time else 1, order, 1, span))
        for when_s, _, _, has_ended, span in sorted(events, key=lambda event: event[:4]):
            try:
                (self._end if has_ended else self._begin)(span)
                self._check_nothing_is_lost()
            except Fault as fault:
                raise Fault(f"{fault} at {when_s}: {span}") from None

    # -- one span --------------------------------------------------------------------------------------------------

    def _begin(self, span: LayerSpan) -> None:
        source, target = self._ends(span)
        latest = (span.layer, self.versions[span.layer])
        self._demand(self.contents.get(source) == latest, f"{source} has {self.contents.get(source)}, not {latest}")
        for user in self._users.get(source, []):
            reads = user.direction is not None and self._ends(user)[0] == source
            self._demand(reads and span.direction is not None, f"{source} is in use by {user}")
        if target is not None:
            self._demand(not self._users.get(target), f"{target} is in use by {self._users.get(target)}")
            self._take(span, target, latest)
        for place in filter(None, (source, target)):
            self._users.setdefault(place, []).append(span)

    def _take(self, span: LayerSpan, target: Place, content: Content) -> None:
        self._taken[id(span)] = content
        if span.direction is Direction.OUTBOUND and self.copies_rows:
            before = (content[0], content[1] - 1)
            self._demand(self.contents.get(target) == before, f"rows are added to {self.contents.get(target)}")
        else:
            self.contents.pop(target, None)

    def _end(self, span: LayerSpan) -> None:
        source, target = self._ends(span)
        for place in filter(None, (source, target)):
            self._users[place].remove(span)
        if target is None:
            self.versions[span.layer] += 1
            self.contents[source] = (span.layer, self.versions[span.layer])
        else:
            self.contents[target] = self._taken.pop(id(span))

    def _ends(self, span: LayerSpan) -> tuple[Place, Place | None]:
        """Return source and target of a copy; of a layer that computes, its only place."""
        device = ("device", span.device_place)
        if span.direction is None:
            return device, None
        assert span.host_place is not None
        host = ("host", span.host_place)
        return (device, host) if span.direction is Direction.OUTBOUND else (host, device)

    # -- laws ------------------------------------------------------------------------------------------------------

    def _check_nothing_is_lost(self) -> None:
        there = {*self.contents.values()}
        for content in enumerate(self.versions):
            self._demand(content in there, f"layer {content[0]} is nowhere whole")

    @staticmethod
    def _demand(is_so: bool, fault: str) -> None:
        if not is_so:
            raise Fault(fault)


def bytes_of_places(places: LayerPlaces) -> Bytes:
    """Return the contents before ``AheadLayers`` or ``OnDemandLayers`` begin: streamed layers are on the host."""
    device: dict[Place, Content] = {("device", n): (n, 0) for n in {*range(places.num_layers)} - {*places.streamed}}
    host: dict[Place, Content] = {("host", layer): (layer, 0) for layer in places.streamed}
    return Bytes(places.num_layers, device | host, copies_rows=True)


def bytes_of_fifo(fifo: PieFifo) -> Bytes:
    """Return the contents before the first step of ``PieLayers``."""
    contents: dict[Place, Content] = {}
    for layer, row in enumerate(fifo.table):
        place = ("host", row.cpu_place) if row.gpu_place is None else ("device", row.gpu_place)
        assert place[1] is not None
        contents[place[0], place[1]] = (layer, 0)
    return Bytes(fifo.num_layers, contents, copies_rows=False)
