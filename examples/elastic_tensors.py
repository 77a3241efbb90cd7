"""Momentum that lies in a neighbour's idle memory while it is lent, and in the host's while it is not.

A small regression is trained by gradient descent with momentum. The momentum of all parameters is one elastic tensor;
the loss does not depend on where its bytes are. Run: ``python examples/elastic_tensors.py [http://127.0.0.1:8100]``,
the address of a ``floodplain coordinator``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import ExitStack

import torch

from floodplain import ElasticPool, HostPeerMemory
from floodplain.core.errors import UserError
from floodplain.lending.agent import LeaseAgent
from floodplain.lending.client import CoordinatorClient
from floodplain.lending.elastic import PageMoves
from floodplain.lending.membership import Membership
from floodplain.memory.peer.memory import PeerMemory

LEARNING_RATE, DECAY = 0.01, 0.9


def train(client: Membership, memory: PeerMemory, num_steps: int, report: Callable[[PageMoves], object]) -> float:
    """Train, with a boundary after every step; return the last loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 512), torch.nn.Tanh(), torch.nn.Linear(512, 1))
    inputs = torch.randn(256, 32)
    targets = inputs.sin().sum(dim=1, keepdim=True)
    num_values = sum(parameter.numel() for parameter in model.parameters())
    with ElasticPool(client, memory) as pool:
        momentum = pool.to_elastic(torch.zeros(num_values))
        for _ in range(num_steps):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            descend(model, momentum.torch())  # wherever its bytes are now
            report(pool.respond())  # nothing uses it here: give back what is recalled, take what is granted
    return loss.item()


@torch.no_grad()
def descend(model: torch.nn.Module, momentum: torch.Tensor) -> None:
    """One step of gradient descent; ``momentum`` has the values of all parameters, one after the other."""
    first = 0
    for parameter in model.parameters():
        part = momentum[first : first + parameter.numel()].view_as(parameter)
        part.mul_(DECAY).add_(parameter.grad)
        parameter.sub_(part, alpha=LEARNING_RATE)
        parameter.grad = None
        first += parameter.numel()


def main() -> None:
    """Read the command line, and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("coordinator", nargs="?", metavar="URL", help="address of a coordinator (default: none)")
    coordinator = parser.parse_args().coordinator
    try:
        print(f"loss {train_with(coordinator):.4f}")
    except UserError as error:
        raise SystemExit(f"{parser.prog}: {error}") from None


def train_with(coordinator: str | None) -> float:
    """Train with what neighbours lend; without a coordinator there are no lenders, and the loss is the same."""
    with ExitStack() as stack:
        client = Membership("alone", "alone")  # without an agent, nothing is ever granted
        if coordinator is not None:
            client = stack.enter_context(
                LeaseAgent(CoordinatorClient(coordinator), f"trainer-{os.getpid()}")
            ).membership
        return train(client, HostPeerMemory(), 200, report=lambda moves: None)


if __name__ == "__main__":
    main()
