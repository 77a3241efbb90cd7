"""Configuration of one engine: its flags, checked."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

from floodplain.core.errors import SettingRefused, UserError
from floodplain.engine.flags import DTYPES, EXPANSION_TIERS, HARDWARE, SWAPS, EngineFlags
from floodplain.engine.memory_flags import check_expansion, check_leases, read_expansion, read_lend
from floodplain.policy.registry import POLICIES
from floodplain.policy.settings import SharingSettings, settings_for

MAX_BLOCK_TOKENS = 1024
_COUNTS = (
    "block_tokens", "max_batched_tokens", "max_num_seqs", "max_waiting", "kv_memory", "max_model_len", "swap_memory",
    "peer_memory", "expansion_memory",
)  # fmt: skip
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "policy": POLICIES, "dtype": DTYPES, "swap": SWAPS, "hardware": (None, *HARDWARE),
    "expansion_tier": EXPANSION_TIERS,
}  # fmt: skip
_USED_BY = {
    "slice": ("cfs", "fair", "paced", "timely"), "fair_by": ("fair",), "line_patience": ("timely",),
    **dict.fromkeys(("ttft_goal", "tpot_goal", "pace", "max_gap"), ("paced", "timely")),
}  # fmt: skip
_NOUNS = {int: "a whole number", float: "a number", str: "a word", bool: "True or False"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineFlags):
    """A resolved configuration: saved beside every result, never changed.

    Raises:
        UserError: A value is out of its range; the message names the flag.
    """

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(EngineConfig).items():
            _check_type(name, getattr(self, name), get_args(hint) or (hint,))
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} must be a whole number of at least 1, not {value!r}")
        if self.max_batched_tokens < self.max_num_seqs:
            raise UserError(
                f"--max-batched-tokens {self.max_batched_tokens} must be at least --max-num-seqs {self.max_num_seqs}: "
                "each stream gets a token in every step"
            )
        if self.block_tokens > MAX_BLOCK_TOKENS:
            raise UserError(f"--block-tokens must be at most {MAX_BLOCK_TOKENS}, not {self.block_tokens}")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise UserError(
                    f"--{name.replace('_', '-')} must be one of {', '.join(filter(None, choices))}, not {value!r}"
                )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise UserError(f"--max-model-len must be at least 2, not {self.max_model_len}")
        if not 0 <= self.return_after < math.inf:
            raise UserError(f"--return-after must be a number of seconds of at least 0, not {self.return_after!r}")
        if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", self.device):
            raise UserError(f"--device must be cpu, cuda or cuda:INDEX, not {self.device!r}")
        self._check_swap()
        check_leases(self)
        check_expansion(self)
        try:
            self.sharing_settings()
        except SettingRefused as error:
            raise error.as_flags() from None

    def sharing_settings(self) -> SharingSettings:
        """Settings for time-slicing policies; without ``--slice`` the policy's default slice.

        Raises:
            SettingRefused: A value is out of its range.
        """
        asked = {} if self.slice is None else {"slice_steps": self.slice}
        return settings_for(
            self.policy,
            ttft_goal_s=self.ttft_goal,
            tpot_goal_s=self.tpot_goal,
            pace=self.pace,
            max_gap_s=self.max_gap,
            line_patience=self.line_patience,
            fair_by=self.fair_by,
            **asked,
        )

    @property
    def lends(self) -> bool:
        """Whether neighbours may borrow."""
        return self.lend != "off"

    @property
    def most_lent_bytes(self) -> int | None:
        """Most bytes to lend: 0 for ``off``, None for ``auto`` (as much as can be spared).

        Raises:
            UserError: ``--lend`` is neither off, auto nor a size.
        """
        return read_lend(self.lend)

    def unused_flags(self) -> list[str]:
        """Flags that were changed from their defaults but that the policy does not use."""
        return [
            f"--{item.name.replace('_', '-')}"
            for item in fields(self)
            if self.policy not in _USED_BY.get(item.name, (self.policy,)) and getattr(self, item.name) != item.default
        ]

    @property
    def asked_expansion(self) -> float | None:
        """The configured expansion of the KV pool: 1 for ``off``, None for ``auto``.

        Raises:
            UserError: ``--kv-expansion`` is neither off, auto nor a number above 1.
        """
        return read_expansion(self.kv_expansion)

    def _check_swap(self) -> None:
        if self.swap == "none":
            for name, value in (("--swap-memory", self.swap_memory), ("--hardware", self.hardware)):
                if value is not None:
                    raise UserError(f"{name} says how to swap, and --swap none does not: leave one of them out")
        if self.peer_memory is not None and self.swap != "peer":
            raise UserError(
                f"--peer-memory says how much to borrow, and --swap {self.swap} does not: leave one of them out"
            )
        if self.hardware is not None and self.device != "cpu":
            raise UserError(f"--hardware {self.hardware} emulates a link on a CPU: leave it out with --device cuda")


def _check_type(name: str, value: Any, kinds: tuple[type, ...]) -> None:
    """Check the type of a field: Python callers may pass any, while the command line has parsed its values."""
    if type(value) in kinds or (type(value) is int and float in kinds) or (isinstance(value, str) and str in kinds):
        return
    at_least = " of at least 1" if name in _COUNTS else ""
    raise UserError(f"--{name.replace('_', '-')} must be {_NOUNS[kinds[0]]}{at_least}, not {value!r}")
