"""Claims of a paper's figures beside what is simulated here, and the one rule of verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from statistics import fmean
from typing import Any, Literal

Bound = Literal["about", "at least", "at most"]
TOLERANCE = 1.25
"""A claim holds if ours differs from it by at most this factor."""


class Verdict(StrEnum):
    """What became of a claim."""

    REPRODUCED = "reproduced"
    WITH_ASSUMPTION = "only with an assumption"
    NOT_REPRODUCED = "not reproduced"


@dataclass(frozen=True, slots=True)
class Statement:
    """A number that a figure of a paper claims.

    Attributes:
        quantity: Which of the quantities that a figure measures it is compared with.
        bound: ``at least`` and ``at most`` hold on one side whatever the distance.
        own: The quantity that says the same of Floodplain's own way; None if there is none.
        fitted: The parameter that was fitted to this very claim; None if none was.
        assumed: A mechanism that decides the number, and that is assumed instead of simulated; None if there is none.
    """

    text: str
    paper: float
    quantity: str
    _: KW_ONLY
    unit: str = "x"
    bound: Bound = "about"
    own: str | None = None
    fitted: str | None = None
    assumed: str | None = None

    def holds(self, ours: float) -> bool:
        """Whether a number of ours agrees with the paper's."""
        is_enough = self.bound == "at most" or ours >= self.paper / TOLERANCE
        return is_enough and (self.bound == "at least" or ours <= self.paper * TOLERANCE)


@dataclass(frozen=True, slots=True)
class Unknown:
    """A fact that is not in the paper: values that are tried, by their labels, and the one taken for ours."""

    name: str
    values: Mapping[str, Any]
    default: str


Curve = tuple[Sequence[float] | Sequence[str], Sequence[float]]
"""Places and values; places that are texts are bars."""
Curves = Mapping[str, Curve]


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn: curves over one horizontal axis, in panels by the label of their vertical axes."""

    x_label: str
    panels: Mapping[str, Curves]


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a figure: its quantities by name, and its picture."""

    quantities: Mapping[str, float]
    picture: Picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A statement beside what was simulated.

    Attributes:
        ours: The mean over seeds, at the default of the unknown; ``spread`` is the least and the largest of a seed.
        sweep: The mean over seeds at each value of the unknown, by label; empty without an unknown.
        own: The same number of Floodplain's own way; None if there is none.
    """

    statement: Statement
    ours: float
    spread: tuple[float, float]
    sweep: Mapping[str, float]
    unknown: str | None
    own: float | None

    @property
    def ratio(self) -> float:
        """Ours over the paper's."""
        return self.ours / self.statement.paper

    @property
    def verdict(self) -> Verdict:
        """``REPRODUCED`` if ours holds, with nothing fitted to the claim, and no mechanism assumed.

        Else ``WITH_ASSUMPTION`` if it holds nevertheless, if a value of the unknown holds, or if the claim lies between
        those of two values.
        """
        if self.statement.holds(self.ours):
            is_free = self.statement.fitted is None and self.statement.assumed is None
            return Verdict.REPRODUCED if is_free else Verdict.WITH_ASSUMPTION
        swept = self.sweep.values()
        is_between = bool(swept) and min(swept) <= self.statement.paper <= max(swept)
        if is_between or any(map(self.statement.holds, swept)):
            return Verdict.WITH_ASSUMPTION
        return Verdict.NOT_REPRODUCED

    @property
    def condition(self) -> str:
        """The assumption with which the claim comes nearest; empty if none is needed, or none helps."""
        if self.verdict is not Verdict.WITH_ASSUMPTION:
            return ""
        if self.statement.holds(self.ours):
            return (
                f"{self.statement.fitted}, fitted to this claim"
                if self.statement.fitted
                else f"{self.statement.assumed}"
            )
        nearest = min(self.sweep, key=lambda label: abs(self.sweep[label] - self.statement.paper))
        return (
            f"{self.unknown} {nearest}" if self.statement.holds(self.sweep[nearest]) else f"{self.unknown}, in between"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of a paper, and how it is simulated.

    Attributes:
        name: Such as ``aqua-13``.
        setting: Models, GPUs, workload and baselines: the paper's.
        assumptions: Those that are ours.
        measure: (a value of the unknown, or None without one; a seed) to one run; the same for the same arguments.
    """

    name: str
    shows: str
    setting: str
    statements: tuple[Statement, ...]
    assumptions: tuple[str, ...]
    measure: Callable[[Any, int], Measured]
    unknown: Unknown | None = None

    @property
    def paper(self) -> str:
        """The paper's short name, such as ``aqua``."""
        return self.name.partition("-")[0]

    def list_runs(self, seeds: Sequence[int]) -> list[tuple[str, int]]:
        """(label of the unknown's value, seed) of all runs; the default's come first."""
        labels = [""]
        if self.unknown is not None:
            labels = sorted(self.unknown.values, key=lambda label: label != self.default)
        return [(label, seed) for label in labels for seed in seeds]

    @property
    def default(self) -> str:
        """The label of the value that is taken for ours; empty without an unknown."""
        return self.unknown.default if self.unknown else ""

    def run_once(self, label: str, seed: int) -> Measured:
        """One of ``list_runs``."""
        return self.measure(self.unknown.values[label] if self.unknown else None, seed)

    def judge(self, runs: Mapping[tuple[str, int], Measured]) -> Finding:
        """The claims and the picture, from the runs that ``list_runs`` names."""
        picture = next(run.picture for (label, _), run in runs.items() if label == self.default)
        return Finding(self, tuple(self._claim(statement, runs) for statement in self.statements), picture)

    def _claim(self, statement: Statement, runs: Mapping[tuple[str, int], Measured]) -> Claim:
        def values(quantity: str, label: str) -> list[float]:
            return [run.quantities[quantity] for (which, _), run in runs.items() if which == label]

        ours = values(statement.quantity, self.default)
        labels = self.unknown.values if self.unknown else ()
        return Claim(
            statement=statement,
            ours=fmean(ours),
            spread=(min(ours), max(ours)),
            sweep={label: fmean(values(statement.quantity, label)) for label in labels},
            unknown=self.unknown.name if self.unknown else None,
            own=fmean(values(statement.own, self.default)) if statement.own else None,
        )


@dataclass(frozen=True, slots=True)
class Finding:
    """What came out of a figure."""

    figure: Figure
    claims: tuple[Claim, ...]
    picture: Picture
