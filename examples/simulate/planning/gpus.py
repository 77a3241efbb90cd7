"""The GPUs of a placement, and the load of each over the day."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from examples.simulate.planning.day import Day
from floodplain.coordinator.placement import read_pairs
from floodplain.core.errors import UserError
from floodplain.files.parsing import read_json_object
from floodplain.leases.choice import AllowedPairs

HERE = Path(__file__).resolve().parent
BORROWER, LENDER = "code", "chat"
"""Models of the placement: the one of ``pair.yaml``, and the one that lends to it."""
GPUS_PER_DEPLOYMENT = 20
"""GPUs of one model that share their users, and so their bursts."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of the models that borrow and lend, and the load of each.

    ``rates`` are [names, slots], over the model's mean rate; ``pairs`` name the lender of each borrower.
    """

    names: dict[str, list[str]]
    servers: list[list[str]]
    rates: dict[str, NDArray[np.float64]]
    pairs: AllowedPairs

    def rate(self, model: str, name: str, slot: int) -> float:
        """The rate of a GPU in a slot, over its model's mean."""
        return float(self.rates[model][self.names[model].index(name), slot])


def read_gpus(placement: Path, day: Day) -> Gpus:
    """The GPUs in a file of ``floodplain place --out``, with a load for each deployment.

    UserError if it is no placement, or lacks one of the models.
    """
    pairs, servers = read_pairs(placement), read_json_object(placement)["servers"]
    names: dict[str, list[str]] = {BORROWER: [], LENDER: []}
    for server in servers:
        for unit in server["units"]:
            if unit["model"] in names:
                names[unit["model"]] += unit["devices"]
    if missing := [model for model, gpus in names.items() if not gpus]:
        raise UserError(f"{placement} has no GPU of the model {missing[0]}: place {BORROWER} and {LENDER}")
    rates = {}
    for model, gpus in names.items():
        drawn = day.draw_rates(-(-len(gpus) // GPUS_PER_DEPLOYMENT))
        rates[model] = drawn[np.arange(len(gpus)) // GPUS_PER_DEPLOYMENT]
    used = {name for gpus in names.values() for name in gpus}
    placed = [[name for unit in server["units"] for name in unit["devices"] if name in used] for server in servers]
    return Gpus(names, placed, rates, pairs)
