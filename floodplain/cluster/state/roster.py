"""The joined instances, each under a unique epoch, and the prefixes that each was given. No I/O, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from floodplain.cluster.wire.messages import InstanceFacts, StageFacts
from floodplain.core.errors import InvariantError
from floodplain.core.hashing import BlockKey


class PrefixMemory:
    """The keys of the last ``max_keys`` blocks that an instance was given. It may have evicted them since."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def count_known(self, keys: Sequence[BlockKey]) -> int:
        """The number of leading keys that are remembered."""
        return sum(1 for _ in takewhile(self._keys.__contains__, keys))

    def note(self, keys: Sequence[BlockKey]) -> None:
        """Add keys of blocks that the instance computes next."""
        for key in keys:
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)


STATES = ("serving", "forming", "leaving", "paused", "leading", "grouped")


@dataclass(eq=False, slots=True)
class Instance:
    """One session of one instance: from joining until its connection ends or it is silent for too long.

    Attributes:
        slot: The launcher's slot of it; None if the launcher did not start it.
        joined_s: When it joined; ``heard_s``: when its last message arrived.
        num_blocks: Blocks of its pool, by its last message that names them.
        num_demanded_blocks: Blocks of the requests that are placed on it, under ``tickets``.
        is_leaving: Whether it is draining and accepts no more requests.
        stage: Its part of a pipeline; None if it has all layers. ``is_linked``: whether its pipeline is formed.
        can_move: Whether running requests may migrate to it and from it with their KV.
        was_serving: Whether it has been able to serve since it joined.
        part: Its part in such a group, one of ``paused``, ``leading``, ``grouped``; None while it is in none.
    """

    epoch: int
    facts: InstanceFacts
    slot: int | None
    joined_s: float
    heard_s: float
    num_blocks: int
    prefixes: PrefixMemory
    num_demanded_blocks: int = 0
    tickets: set[int] = field(default_factory=set)
    is_leaving: bool = False
    stage: StageFacts | None = None
    is_linked: bool = False
    can_drop: bool = False
    can_move: bool = False
    was_serving: bool = False
    part: str | None = None

    @property
    def name(self) -> str:
        """Its slot; ``e`` and its epoch if it has no slot. Commands use this name."""
        return f"e{self.epoch}" if self.slot is None else str(self.slot)

    def __str__(self) -> str:
        """Its name for logs; with the epoch if the name is a slot."""
        return f"instance {self.name}" + ("" if self.slot is None else f" (epoch {self.epoch})")

    @property
    def can_serve(self) -> bool:
        """Whether requests on it, its pipeline or its group are computed now or soon."""
        return not self.is_leaving and (self.stage is None or self.is_linked)

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may be placed on it. In a pipeline: on the first stage only."""
        return self.state in ("serving", "leading") and (self.stage is None or not self.stage.stage)

    @property
    def state(self) -> str:
        """One of ``STATES``: a stage is ``forming`` until its pipeline is formed."""
        if self.is_leaving:
            return "leaving"
        if self.part is not None:
            return self.part
        return "serving" if self.stage is None or self.is_linked else "forming"


class Roster:
    """All joined instances. One that sends nothing for ``silence_s`` seconds is declared dead.

    ``first_facts`` of the instance that joined first match all others' (``find_difference``); None before.
    """

    def __init__(self, silence_s: float) -> None:
        self.first_facts: InstanceFacts | None = None
        self._silence_s = silence_s
        self._instances: dict[int, Instance] = {}
        self._next_epoch = 1
        self._looked_s: float | None = None

    def __iter__(self) -> Iterator[Instance]:
        return iter(list(self._instances.values()))

    def __len__(self) -> int:
        return len(self._instances)

    @property
    def can_serve(self) -> bool:
        """Whether any instance can serve."""
        return any(one.can_serve for one in self._instances.values())

    def get(self, epoch: int) -> Instance | None:
        """The instance of this epoch; None once its session has ended."""
        return self._instances.get(epoch)

    def name_of(self, epoch: int) -> str:
        """Its name in commands and logs; ``e`` and the epoch once its session has ended."""
        instance = self._instances.get(epoch)
        return f"e{epoch}" if instance is None else instance.name

    def expect(self, epoch: int) -> Instance:
        """The instance of this epoch. Raises ``InvariantError`` if there is none."""
        if epoch not in self._instances:
            raise InvariantError(f"epoch {epoch} has ended")
        return self._instances[epoch]

    def join(self, facts: InstanceFacts, slot: int | None, now: float, stage: StageFacts | None = None) -> Instance:
        """Add an instance, under a new epoch."""
        self.first_facts = self.first_facts or facts
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        prefixes = PrefixMemory(facts.num_blocks)
        instance = Instance(epoch, facts, slot, now, now, facts.num_blocks, prefixes)
        instance.stage = stage
        self._instances[epoch] = instance
        return instance

    def hear(self, epoch: int, now: float) -> bool:
        """Note a message of an epoch. False: the epoch has ended, and its message must be ignored."""
        instance = self._instances.get(epoch)
        if instance is not None:
            instance.heard_s = now
        return instance is not None

    def remove(self, epoch: int) -> Instance | None:
        """Remove the instance whose session ends; None if it was removed before."""
        return self._instances.pop(epoch, None)

    def find_silent(self, now: float) -> list[int]:
        """Epochs of instances that have been silent for too long. Call several times in each ``silence_s``.

        If this process itself was stopped since the last call, messages may be unread: every silence restarts.
        """
        if self._looked_s is None or now - self._looked_s > self._silence_s / 2:
            for instance in self._instances.values():
                instance.heard_s = now
        self._looked_s = now
        return [one.epoch for one in self._instances.values() if now - one.heard_s > self._silence_s]
