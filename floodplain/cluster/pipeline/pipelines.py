"""Forms pipelines of joined stages, which end together. No I/O, no clock.

A pipeline is formed when all of its stages have joined, under a unique number. It serves when all
members are linked. When the session of one ends, the sessions of the others end: the KV of its layers is lost for every
request. They join again, with their parameters, and the next pipeline is formed when the missing stage has joined.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from floodplain.core.errors import InvariantError


@dataclass(eq=False, slots=True)
class Pipeline:
    """One pipeline, from its formation to its end.

    Attributes:
        number: The pipeline's number.
        epochs: Of its members, by stage; the first is the leader, on which requests are placed.
        linked: Epochs of members that are linked with both neighbours.
    """

    number: int
    epochs: tuple[int, ...]
    linked: set[int] = field(default_factory=set)

    @property
    def is_whole(self) -> bool:
        """Whether all members are linked: it serves."""
        return len(self.linked) == len(self.epochs)


class PipelineTable:
    """The joined stages, and the pipelines that they form.

    Args:
        num_stages: Stages of each pipeline.
    """

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self._gathered: dict[int, int] = {}
        self._pipelines: dict[int, Pipeline] = {}
        self._next_number = 1

    @property
    def pipelines(self) -> list[Pipeline]:
        """The pipelines that were formed and have not ended."""
        return list(self._pipelines.values())

    def join(self, epoch: int, stage: int) -> int | None:
        """A stage joined, under a new epoch.

        Returns:
            The epoch of an older instance of the same stage, perhaps silent, whose session must end; None if none.
        """
        older = self._gathered.get(stage)
        self._gathered[stage] = epoch
        return older

    def form(self) -> Pipeline | None:
        """The next pipeline, if all of its stages have joined; else None."""
        if len(self._gathered) < self.num_stages:
            return None
        epochs = tuple(self._gathered[stage] for stage in range(self.num_stages))
        self._gathered.clear()
        pipeline = Pipeline(self._next_number, epochs)
        self._next_number += 1
        self._pipelines[pipeline.number] = pipeline
        return pipeline

    def link(self, epoch: int, number: int) -> Pipeline | None:
        """A member is linked. The pipeline if all are linked now; else None, also if it has ended."""
        pipeline = self._pipelines.get(number)
        if pipeline is None or epoch not in pipeline.epochs or pipeline.is_whole:
            return None
        pipeline.linked.add(epoch)
        return pipeline if pipeline.is_whole else None

    def end(self, epoch: int) -> list[int]:
        """An instance's session has ended. The epochs of the other members of its pipeline, last stage first."""
        self._gathered = {stage: other for stage, other in self._gathered.items() if other != epoch}
        ended = [pipeline for pipeline in self._pipelines.values() if epoch in pipeline.epochs]
        for pipeline in ended:
            del self._pipelines[pipeline.number]
        return [other for pipeline in ended for other in reversed(pipeline.epochs) if other != epoch]

    def check_integrity(self) -> None:
        """Check that no epoch is in two places.

        Raises:
            InvariantError: One is.
        """
        placed = [*self._gathered.values(), *(epoch for one in self._pipelines.values() for epoch in one.epochs)]
        if len(placed) != len(set(placed)):
            raise InvariantError("a stage is in two pipelines, or in one and waiting for one")
