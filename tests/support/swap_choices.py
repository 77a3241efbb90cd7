"""Choices of a scripted policy, step by step, for sequences that are swapped out and in."""

from __future__ import annotations

from floodplain.core.plan import (
    BackupOrder,
    Decision,
    Preemption,
    PreemptionMode,
    Reason,
    Resumption,
    StepPlan,
)
from floodplain.core.request import SeqId
from floodplain.core.tiers import Tier
from floodplain.core.view import View
from tests.support.driver import Choice, Driver, ScriptedPolicy
from tests.support.loops import make_loop

FIRST, SECOND = SeqId(0), SeqId(1)


def make_driver(num_blocks: int = 16, num_slots: int = 16, **kwargs: object) -> Driver:
    policy = ScriptedPolicy()
    return Driver(make_loop(policy=policy, num_blocks=num_blocks, num_slots=num_slots, **kwargs))  # type: ignore[arg-type]


def choose(driver: Driver, *choices: Choice) -> None:
    """Set the policy's next choices, instead of FCFS."""
    driver.loop.policy.script.extend(choices)  # type: ignore[attr-defined]


def swap_out(seq_id: SeqId) -> Choice:
    order = Preemption(seq_id, PreemptionMode.SWAP, Reason.SLICE_ENDED, Tier.HOST)
    return lambda view: Decision(preemptions=(order,))


def decoding(view: View) -> tuple[SeqId, ...]:
    return tuple(row.seq_id for row in view.running if row.is_decoding)


def resume(seq_id: SeqId) -> Choice:
    order = Resumption(seq_id, Reason.SLICE_BEGINS)
    return lambda view: Decision(decodes=decoding(view), resumptions=(order,))


def back_up(seq_id: SeqId, num_blocks: int = 99) -> Choice:
    """Back up beside the decodes of all streams, as a policy does."""
    order = BackupOrder(seq_id, num_blocks, Tier.HOST)
    return lambda view: Decision(decodes=decoding(view), backups=(order,))


def idle(view: View) -> Decision:
    """Decide nothing; only while a step or a copy is in flight, else the loop reports a stall."""
    return Decision()


def start(driver: Driver, prompt: range = range(10), max_tokens: int = 12) -> SeqId:
    seq_id = driver.submit(prompt, max_tokens=max_tokens, ignore_eos=True)
    driver.step()
    return seq_id


def plan(driver: Driver, *choices: Choice) -> StepPlan:
    choose(driver, *choices)
    made = driver.plan()
    assert isinstance(made, StepPlan)
    driver.complete()
    return made
