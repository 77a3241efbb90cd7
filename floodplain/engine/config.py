"""Configuration of one engine: its flags, checked."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

from floodplain.core.errors import SettingRefused, UserError
from floodplain.core.sizes import format_size, parse_size, show_size
from floodplain.engine.flags import (
    DEFAULT_LEASE_IDLE_S,
    DEFAULT_LEND_AFTER_S,
    DEFAULT_RECALL_DEADLINE_S,
    DTYPES,
    EXPANSION_TIERS,
    HARDWARE,
    HOST_TIER,
    PEER_TIER,
    SWAPS,
    EngineFlags,
)
from floodplain.memory.host.named_file import NAME
from floodplain.memory.host_memory import available_bytes
from floodplain.model.weights.peek import peek_shape
from floodplain.policy.registry import POLICIES
from floodplain.policy.settings import SharingSettings, settings_for

MAX_BLOCK_TOKENS = 1024
_MIN_LEND_AFTER_S, _MAX_LEND_AFTER_S = 0.1, 86400.0
_MIN_LOOK_S, _MAX_LOOK_S = 0.001, 1.0
_MIN_LEASE_IDLE_S, _MAX_LEASE_IDLE_S = 0.1, 86400.0
_MIN_RECALL_DEADLINE_S, _MAX_RECALL_DEADLINE_S = 0.5, 86400.0
"""At least 0.5 s, since consumers take their last resort a quarter of a second before the deadline."""
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
    """A resolved configuration: saved beside every result, never changed. Raises UserError, which names the flag."""

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
        self._check_leases()
        self._check_expansion()
        try:
            self.sharing_settings()
        except SettingRefused as error:
            raise error.as_flags() from None

    def sharing_settings(self) -> SharingSettings:
        """Settings for time-slicing policies; without ``--slice`` the policy's default slice. Raises SettingRefused."""
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
        """Most bytes to lend: 0 for ``off``, None for ``auto`` (as much as can be spared)."""
        if self.lend in ("off", "auto"):
            return 0 if self.lend == "off" else None
        try:
            return parse_size(self.lend)
        except UserError as error:
            raise UserError(f"--lend must be off, auto, or a size: {error}") from None

    def unused_flags(self) -> list[str]:
        """Flags that were changed from their defaults but that the policy does not use."""
        return [
            f"--{item.name.replace('_', '-')}"
            for item in fields(self)
            if self.policy not in _USED_BY.get(item.name, (self.policy,)) and getattr(self, item.name) != item.default
        ]

    @property
    def asked_expansion(self) -> float | None:
        """The configured expansion of the KV pool: 1 for ``off``, None for ``auto``."""
        if self.kv_expansion in ("off", "auto"):
            return 1.0 if self.kv_expansion == "off" else None
        try:
            expansion = float(self.kv_expansion)
        except ValueError:
            expansion = 0.0
        if not 1.0 < expansion < math.inf:
            raise UserError(f"--kv-expansion must be off, auto, or a number above 1, not {self.kv_expansion!r}")
        return expansion

    def _check_swap(self) -> None:
        if self.swap == "none":
            given = {"--swap-memory": self.swap_memory, "--hardware": self.hardware}
            for name, value in (given | {"--pin-sessions": self.pin_sessions or None}).items():
                if value is not None:
                    raise UserError(f"{name} says how to swap, and --swap none does not: leave one of them out")
        if self.pin_sessions and not self.enable_prefix_caching:
            raise UserError(
                "--pin-sessions keeps prefixes, and --no-enable-prefix-caching reuses none: leave one of them out"
            )
        if self.peer_memory is not None and self.swap != "peer":
            raise UserError(
                f"--peer-memory says how much to borrow, and --swap {self.swap} does not: leave one of them out"
            )
        if self.hardware is not None and self.device != "cpu":
            raise UserError(f"--hardware {self.hardware} emulates a link on a CPU: leave it out with --device cuda")

    def _check_leases(self) -> None:
        lent_bytes = self.most_lent_bytes
        if self.coordinator is None:
            self._check_alone(lent_bytes)
        if self.lease_look is not None and not _MIN_LOOK_S <= self.lease_look <= _MAX_LOOK_S:
            raise UserError(
                f"--lease-look must be between {_MIN_LOOK_S:g} and {_MAX_LOOK_S:g} s, not {self.lease_look}: rarer "
                "looks would let deadlines pass"
            )
        _check_range("--lend-after", self.lend_after, _MIN_LEND_AFTER_S, _MAX_LEND_AFTER_S)
        _check_range("--recall-deadline", self.recall_deadline, _MIN_RECALL_DEADLINE_S, _MAX_RECALL_DEADLINE_S)
        self._check_idle()
        if self.lend == "off":
            self._check_lends_nothing()
        if self.profile is not None and self.lend != "auto":
            raise UserError(
                f"--profile says what --lend auto starts from, and --lend is {self.lend}: change one of them"
            )
        if self.device_name is not None and not NAME.fullmatch(self.device_name):
            raise UserError(f"--device-name {self.device_name!r} must be 1 to 64 letters, digits, '.', '_' or '-'")

    def _check_alone(self, lent_bytes: int | None) -> None:
        if self.swap == "peer":
            raise UserError("--swap peer needs --coordinator: it knows which devices lend memory")
        if lent_bytes != 0:
            raise UserError(f"--lend {self.lend} needs --coordinator: it tells borrowers of lent memory")
        if self.lease_look is not None:
            raise UserError("--lease-look needs --coordinator: without one there are no leases to look at")
        if self.coordinator_token_file is not None:
            raise UserError("--coordinator-token-file needs --coordinator: the token is sent to it")

    def _check_idle(self) -> None:
        if self.lease_idle != 0 and not _MIN_LEASE_IDLE_S <= self.lease_idle <= _MAX_LEASE_IDLE_S:
            raise UserError(
                f"--lease-idle must be between {_MIN_LEASE_IDLE_S:g} and {_MAX_LEASE_IDLE_S:g} s, or 0 to return "
                f"nothing, not {self.lease_idle}"
            )
        if self.lease_idle != DEFAULT_LEASE_IDLE_S and self.swap != "peer":
            raise UserError(
                f"--lease-idle says when to return what was borrowed, and --swap {self.swap} borrows nothing: leave "
                "one of them out"
            )

    def _check_lends_nothing(self) -> None:
        if self.lend_after != DEFAULT_LEND_AFTER_S:
            raise UserError("--lend-after says when to lend, and --lend off does not: leave one of them out")
        if self.recall_deadline != DEFAULT_RECALL_DEADLINE_S:
            raise UserError("--recall-deadline says how to recall, and --lend off lends nothing: leave one of them out")

    def _check_expansion(self) -> None:
        expansion = self.asked_expansion
        if expansion == 1.0:
            for name, is_set in (("--expansion-memory", self.expansion_memory is not None),
                                 ("--expansion-tier", self.expansion_tier != HOST_TIER),
                                 ("--long-prompts", self.long_prompts)):  # fmt: skip
                if is_set:
                    raise UserError(
                        f"{name} says how to expand, and --kv-expansion off does not: leave one of them out"
                    )
        elif self.lend != "off":
            raise UserError(
                f"--kv-expansion {self.kv_expansion} takes the pages of layers, and --lend {self.lend} gives the same "
                "pages away: leave one of them out"
            )
        elif self.expansion_tier == PEER_TIER and self.coordinator is None:
            raise UserError("--expansion-tier peer needs --coordinator: it alone knows which neighbours lend memory")
        if self.long_prompts and expansion is None and self.max_model_len is None:
            raise UserError("--long-prompts with --kv-expansion auto needs --max-model-len: how long may a request be?")


def _check_type(name: str, value: Any, kinds: tuple[type, ...]) -> None:
    """Check the type of a field: Python callers may pass any, while the command line has parsed its values."""
    if type(value) in kinds or (type(value) is int and float in kinds) or (isinstance(value, str) and str in kinds):
        return
    at_least = " of at least 1" if name in _COUNTS else ""
    raise UserError(f"--{name.replace('_', '-')} must be {_NOUNS[kinds[0]]}{at_least}, not {value!r}")


def _check_range(flag: str, value_s: float, least_s: float, most_s: float) -> None:
    if not least_s <= value_s <= most_s:
        raise UserError(f"{flag} must be between {least_s:g} and {most_s:g} s, not {value_s}")


_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def check_early(config: EngineConfig) -> None:
    """Check that the model exists, and that memory sizes fit the machine and a KV block. Raises UserError."""
    sizes = {"--kv-memory": config.kv_memory, "--swap-memory": config.swap_memory}
    asked = {flag: size for flag, size in sizes.items() if size is not None}
    if config.device == "cpu":
        available = available_bytes()
        for flag, size in asked.items():
            if size > available:
                asked_size, free = format_size(size), show_size(available)
                raise UserError(f"{flag} {asked_size} is more than the {free} that this machine has free: lower it")
    block_bytes = config.block_tokens * peek_shape(config.model).kv_bytes_per_token(_ITEM_BYTES[config.dtype])
    for flag, size in asked.items():
        if size < block_bytes:
            least = show_size(block_bytes)
            raise UserError(f"{flag} {format_size(size)} is less than one KV block of {least}: raise it")
