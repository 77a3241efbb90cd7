"""The ways that are compared: a policy, its settings, its swap space, and what steps and copies cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.policies.loads import Load, pool_blocks
from benchmarks.step_line import StepLine
from floodplain.core.plan import StepPlan
from floodplain.policy.base import Policy
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SharingSettings, settings_for

LINE = StepLine(base_s=0.0132, decode_s=0.00064, prefill_token_s=0.0005)
"""A step of SmolLM2 in bf16 on two cores: least squares over the 4,721 steps of a FCFS burst in benchmarks/fairness."""
TURN_STEP_S, TRANSFER_S, BLOCK_S = 0.0006, 0.000143, 0.00006
"""What copies cost where the cores that compute make them, too: seconds of a step with copies, of each transfer, of
each block. From the steps of a paced burst there; on a GPU, which has copy engines, next to nothing."""
PCIE, NVLINK = 0.76e9, 5.4e9
"""Bytes per second: the ratio of PCIe5 and NVLink4, slowed so that the faster is half of this machine's own copies."""


@dataclass(frozen=True, slots=True)
class Way:
    """A policy, its settings, and its swap space."""

    name: str
    policy: str
    bandwidth: float = PCIE
    num_slots: int = 20_000
    settings: SharingSettings = SharingSettings()  # noqa: RUF009 - frozen
    copies_cost: bool = True
    line: StepLine = LINE

    def step_time_s(self, plan: StepPlan) -> float:
        """Seconds of one step."""
        step_s = self.line.time_s(plan)
        if not (step_s and plan.transfers and self.copies_cost):
            return step_s
        num_blocks = sum(len(transfer.blocks) for transfer in plan.transfers)
        return step_s + TURN_STEP_S + TRANSFER_S * len(plan.transfers) + BLOCK_S * num_blocks

    def make_policy(self) -> Policy:
        """A new policy object."""
        return make_policy(self.policy, self.settings)


AQUA, FAIR = settings_for("cfs"), settings_for("fair")
WAYS = (
    Way("fcfs", "fcfs", num_slots=0),
    Way("cfs-sync/pcie", "cfs", settings=replace(AQUA, is_synchronous=True)),
    Way("cfs-sync/nvlink", "cfs", NVLINK, settings=replace(AQUA, is_synchronous=True)),
    Way("cfs/pcie", "cfs", settings=AQUA),
    Way("cfs/nvlink", "cfs", NVLINK, settings=AQUA),
    Way("fair/pcie", "fair", settings=FAIR),
    Way("fair/nvlink", "fair", NVLINK, settings=FAIR),
    Way("paced/pcie", "paced"),
    Way("paced/nvlink", "paced", NVLINK),
    Way("paced/pcie, copies cost nothing", "paced", copies_cost=False),
    Way("paced/pcie, half as quick", "paced", PCIE / 2),
    *(
        Way(f"paced/pcie, swap space of {pools} pool{'s' * (pools > 1)}", "paced", num_slots=pools * pool_blocks())
        for pools in (1, 2, 4, 8)
    ),
    Way("paced, no swap space", "paced", num_slots=0),
)
TRADES = tuple(
    Way(f"paced/nvlink, --max-gap {gap_s}", "paced", NVLINK, settings=SharingSettings(max_gap_s=gap_s))
    for gap_s in (2, 3, 10, 20)
)
"""Under lasting overload, what newcomers gain those who are there lose: the setting chooses where."""
CHOICES = tuple(
    Way(f"paced/pcie, {name}", "paced", settings=SharingSettings(**settings))
    for name, settings in {
        "rotation 0.2": {"rotation_share": 0.2},
        "rotation 0.4": {"rotation_share": 0.4},
        "rotation 0.5": {"rotation_share": 0.5},
        "--slice 2": {"slice_steps": 2},
        "--slice 5": {"slice_steps": 5},
        "--max-gap 10": {"max_gap_s": 10.0},
        "goals half as long": {"ttft_goal_s": 0.24, "tpot_goal_s": 0.035},
        "goals twice as long": {"ttft_goal_s": 0.96, "tpot_goal_s": 0.14},
    }.items()
)
"""Other defaults that were considered."""
SLICES = tuple(
    Way(f"{policy}/pcie, --slice {steps}", policy, settings=SharingSettings(slice_steps=steps))
    for policy, others in {"cfs": (4, 8, 32), "fair": (3, 8, 16, 24)}.items()
    for steps in others
)
"""Other slices for the policies under which nearly all requests take turns."""
FIRST = tuple(
    Way(
        f"paced/nvlink, first tokens first up to a share of {share}",
        "paced",
        NVLINK,
        settings=SharingSettings(prompt_share=share),
    )
    for share in (0.2, 0.4, 1.0)
)
"""Where prompts are most of the work newcomers wait in line: from which part of the work on?"""


def ways_of(load: Load) -> tuple[Way, ...]:
    """What is compared under a load."""
    if load.prompts > 1:
        return (*(way for way in WAYS if "," not in way.name), *FIRST)
    choices = (*CHOICES, *(SLICES if load.factor in (2, 3) else ())) if load.factor > 1 else ()
    return (*WAYS, *choices, *(TRADES if load.factor >= 3 else ()), *(FIRST if load.factor == 2 else ()))
