"""Blocks written behind make preemption cheap, under any ranking; in virtual time.

With room for every copy and no prefix cache, a victim's full blocks are in swap space before it is preempted, and the
switch copies only its last one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from floodplain.core.plan import BackupOrder, Decision, TransferKind
from floodplain.core.sequence import Status
from floodplain.core.view import SequenceView, View
from floodplain.policy.base import SharingPolicy
from floodplain.policy.cfs import CfsPolicy
from floodplain.policy.fair import FairPolicy
from floodplain.policy.paced import PacedPolicy
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings
from floodplain.policy.swap import SwapBudget
from tests.support.bursts import LINE, Machine, Recorder, Run, burst, make_burst

SHARING: dict[str, type[SharingPolicy]] = {"cfs": CfsPolicy, "fair": FairPolicy, "paced": PacedPolicy}

MACHINE = Machine(num_slots=20_000, caches_prefixes=False)
NARROW = replace(MACHINE, line=replace(LINE, base_s=0.003, prefill_token_s=0.001), block_s=0.0015)
"""Almost too slow for turns: a block is computed in 4 ms, and copied in 1.5; in a step, about four are copied."""

SETTINGS = SharingSettings(slice_steps=8)
"""A slice of two blocks of tokens: without writing behind, a swap-out copies more than one block."""


def run_burst(name: str, settings: SharingSettings = SETTINGS, machine: Machine = MACHINE) -> tuple[Run, Recorder]:
    recorder = Recorder(make_policy(name, settings))
    return burst(machine, recorder, make_burst(60, interval_s=0.02, num_prompt=8, max_tokens=40)), recorder


def sizes(run: Run, kind: TransferKind) -> list[int]:
    """Return the blocks of every copy of this kind."""
    return [len(move.blocks) for _, plan in run.steps for move in plan.transfers if move.kind is kind]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARING)
def test_a_preempted_request_has_one_block_to_copy(name: str) -> None:
    """At least 95 %: a request may be preempted in the step in which its block became full."""
    run, _ = run_burst(name)
    swap_outs = sizes(run, TransferKind.SWAP_OUT)
    assert len(swap_outs) > 80
    assert sum(size <= 1 for size in swap_outs) >= 0.95 * len(swap_outs)
    assert sum(sizes(run, TransferKind.BACKUP)) > 0
    assert run.counters.preemptions["recompute"] == 0


@pytest.mark.slow
def test_in_aquas_switch_it_has_more() -> None:
    """Control: AQUA's switch writes nothing behind."""
    run, _ = run_burst("cfs", replace(SETTINGS, is_synchronous=True))
    swap_outs = sizes(run, TransferKind.SWAP_OUT)
    assert sum(size > 1 for size in swap_outs) > 0.5 * len(swap_outs)
    assert not sizes(run, TransferKind.BACKUP)


# -- likeliest victims first -----------------------------------------------------------------------------------------


def num_writable(view: View, row: SequenceView) -> int:
    """Count full blocks of computed tokens without a copy, independently of the product."""
    num_tokens = row.num_scheduled + (view.step - row.since_step if row.is_decoding else 0)
    return max(0, num_tokens // view.block_tokens - row.num_backed_blocks)


def likeliest(view: View, rows: Iterable[SequenceView], decision: Decision) -> list[tuple[int, int]]:
    """Return (request, blocks to write) of residents that stay and have some, in reverse order of rank."""
    gone = {order.seq_id for order in decision.preemptions}
    staying = [row for row in rows if row.status is Status.RUNNING and row.seq_id not in gone]
    return [(row.seq_id, num_writable(view, row)) for row in reversed(staying) if num_writable(view, row)]


def is_in_order(orders: tuple[BackupOrder, ...], victims: list[tuple[int, int]]) -> bool:
    """Each order is for the next victim, none passed over, and complete except the last one, if the link is full."""
    wanted = victims[: len(orders)]
    given = [(order.seq_id, order.num_blocks) for order in orders]
    return given[:-1] == wanted[:-1] and given[-1][0] == wanted[-1][0] and given[-1][1] <= wanted[-1][1]


def out_of_order(name: str) -> tuple[int, int, int]:
    """Return counts of decisions: (out of order, incomplete, all that write behind)."""
    policy, num_broken, num_partial, num_all = SHARING[name](SETTINGS), 0, 0, 0
    for view, now, decision in run_burst(name, machine=NARROW)[1].seen:
        if decision.backups:
            victims = likeliest(view, policy.rank(view, now).rows, decision)
            num_broken += not is_in_order(decision.backups, victims)
            num_partial += sum(order.num_blocks for order in decision.backups) < sum(size for _, size in victims)
            num_all += 1
    return num_broken, num_partial, num_all


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARING)
def test_the_likeliest_victims_are_written_first(name: str) -> None:
    num_broken, num_partial, num_all = out_of_order(name)
    assert num_broken == 0
    assert num_all > 100
    assert num_partial > 10  # the link was too narrow for all, so the order mattered


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARING)
def test_reversed_victims_are_noticed_as_out_of_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = SwapBudget.write_behind

    def write_safest(self: SwapBudget, victims: Iterable[SequenceView]) -> tuple[BackupOrder, ...]:
        return write(self, reversed(list(victims)))

    monkeypatch.setattr(SwapBudget, "write_behind", write_safest)
    num_broken, _, num_all = out_of_order(name)
    assert num_broken > 0.1 * num_all
