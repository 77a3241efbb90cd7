"""Configuration of one engine; its fields are the engine flags of the command line."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from typing import Any, get_args, get_type_hints

from floodplain.core.errors import SettingRefused, UserError
from floodplain.cost.link import LINKS
from floodplain.engine.expansion_flags import EXPANSION_TIERS, check_expansion, read_expansion
from floodplain.engine.lease_flags import (
    DEFAULT_LEASE_IDLE_S,
    DEFAULT_LEND_AFTER_S,
    DEFAULT_RECALL_DEADLINE_S,
    check_leases,
    read_lend,
)
from floodplain.policy.registry import DEFAULT_POLICY, POLICIES
from floodplain.policy.settings import FAIR_BY, SLICE_STEPS, SharingSettings, settings_for


def _flag(
    default: object, help_text: str, choices: tuple[str, ...] | None = None, metavar: str | None = None
) -> object:
    """A field that the command line shows as a flag."""
    return field(default=default, metadata={"help": help_text, "choices": choices, "metavar": metavar})


MAX_BLOCK_TOKENS = 1024
DEFAULT_RETURN_AFTER_S = 60.0
DTYPES = ("float32", "bfloat16")
SWAPS = ("none", "host", "peer")
HARDWARE_PREFIX = "emulated-"
HARDWARE = tuple(f"{HARDWARE_PREFIX}{name}" for name in LINKS)
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
_SHARING = SharingSettings()
_SLICES = ", ".join(f"{policy} {steps}" for policy, steps in SLICE_STEPS.items())
_NOUNS = {int: "a whole number", float: "a number", str: "a word", bool: "True or False"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """A resolved configuration: saved beside every result, never changed.

    Sizes are bytes here; the command line reads ``256MiB`` or ``4GB``.

    Raises:
        UserError: A value is out of its range; the message names the flag.
    """

    model: str = field(metadata={"positional": True, "help": "HF folder, .gguf file, smollm2, or dummy:NAME"})
    policy: str = _flag(DEFAULT_POLICY, "who runs next if not all requests fit", POLICIES)  # type: ignore[assignment]
    slice: int | None = _flag(  # type: ignore[assignment]
        None, f"least steps that a request stays on the device (default: {_SLICES})"
    )
    ttft_goal: float | None = _flag(  # type: ignore[assignment]
        None,
        "paced, timely: seconds to a first token (timely: five times what the median prompt takes without load; paced: "
        "newcomers then go first even where prompts are most of the work)",
    )
    tpot_goal: float | None = _flag(  # type: ignore[assignment]
        None,
        "paced, timely: seconds per token after the first one (default: five times what a token takes without load)",
    )
    pace: float | None = _flag(None, "paced, timely: the same in tokens per second")  # type: ignore[assignment]
    max_gap: float = _flag(  # type: ignore[assignment]
        _SHARING.max_gap_s, "paced, timely: newcomers wait while a stream has been silent for so many seconds"
    )
    line_patience: float = _flag(  # type: ignore[assignment]
        _SHARING.line_patience,
        "timely: a request whose first token cannot be in time waits at most so many times as long as it might have "
        "when all were served by arrival; more lets more requests be in time",
    )
    fair_by: str = _flag("request", "fair: whose work is counted", FAIR_BY)  # type: ignore[assignment]
    kv_memory: int | None = field(
        default=None,
        metadata={"help": "memory of the KV pool, e.g. 512MiB (default: 1GiB on a CPU, 90%% of what is free on a GPU)",
                  "size": True},
    )  # fmt: skip
    block_tokens: int = _flag(16, "tokens in a KV block")  # type: ignore[assignment]
    max_batched_tokens: int = _flag(2048, "most tokens in one step")  # type: ignore[assignment]
    max_num_seqs: int = _flag(256, "most sequences on the device")  # type: ignore[assignment]
    max_waiting: int = _flag(4096, "most requests that wait; the next is refused (HTTP 429)")  # type: ignore[assignment]
    max_model_len: int | None = field(
        default=None, metadata={"help": "most tokens of a request, prompt and output (default: the model's)"}
    )
    enable_prefix_caching: bool = _flag(True, "reuse KV blocks of equal prefixes")  # type: ignore[assignment]
    dtype: str = _flag("bfloat16", "number format of weights and KV", DTYPES)  # type: ignore[assignment]
    pack_weights: bool = _flag(  # type: ignore[assignment]
        True,
        "on a CPU, keep weight matrices in its own blocked layout (in float32 if it multiplies bfloat16 slowly): faster"
        ", but a layer's parameters cannot move",
    )
    device: str = _flag("cpu", "cpu, cuda or cuda:INDEX")  # type: ignore[assignment]
    swap: str = _flag("host", "where KV goes that must leave the device", SWAPS)  # type: ignore[assignment]
    swap_memory: int | None = field(
        default=None,
        metadata={"help": "memory of the swap space (default: 8 KV pools, at most a quarter of what is free; CPU 2GiB)",
                  "size": True},
    )  # fmt: skip
    peer_memory: int | None = field(
        default=None,
        metadata={"help": "with --swap peer, most memory that is borrowed (default: as much as the swap space in host "
                          "memory, which takes what finds no room)",
                  "size": True},
    )  # fmt: skip
    return_after: float = _flag(  # type: ignore[assignment]
        DEFAULT_RETURN_AFTER_S,
        "on a CPU, seconds without use after which memory of KV pool and swap space goes back to the system, with the "
        "prefixes in it; 0 keeps all",
    )
    hardware: str | None = field(
        default=None,
        metadata={"help": "on a CPU, pace copies to swap space as this link would, slowed down by one factor for all "
                          "links (default: as fast as this machine copies)",
                  "choices": HARDWARE},
    )  # fmt: skip
    coordinator: str | None = _flag(  # type: ignore[assignment]
        None, "address of the coordinator of leases; of several, all with commas between", metavar="URL"
    )
    coordinator_token_file: str | None = _flag(  # type: ignore[assignment]
        None, "this engine's token for the coordinator, in a file of mode 0600", metavar="FILE"
    )
    device_name: str | None = _flag(  # type: ignore[assignment]
        None, "what the device is called among neighbours (default: host name and process id)", metavar="NAME"
    )
    lend: str = _flag(  # type: ignore[assignment]
        "off", "how much of the KV pool neighbours may borrow while it is idle: off, auto, or at most a size",
        metavar="SIZE",
    )  # fmt: skip
    lend_after: float = _flag(  # type: ignore[assignment]
        DEFAULT_LEND_AFTER_S, "seconds of calm before memory is lent; the other times of --lend go with it"
    )
    recall_deadline: float = _flag(  # type: ignore[assignment]
        DEFAULT_RECALL_DEADLINE_S, "with --lend, seconds that neighbours are given to return what is recalled"
    )
    profile: str | None = _flag(  # type: ignore[assignment]
        None, "with --lend auto, start from this profile of floodplain profile llm: its rate, its free bytes at most",
        metavar="FILE",
    )  # fmt: skip
    lease_look: float | None = _flag(  # type: ignore[assignment]
        None, "seconds between two looks of the step loop at its leases (default: 0.05 to lend, 0.02 to borrow)"
    )
    lease_idle: float = _flag(  # type: ignore[assignment]
        DEFAULT_LEASE_IDLE_S, "with --swap peer, seconds without use after which a lease is returned; 0 keeps all"
    )
    kv_expansion: str = _flag(  # type: ignore[assignment]
        "off", "let layers of the KV cache stream, so that its memory holds X times as many blocks, or as pays: auto",
        metavar="off|auto|X",
    )  # fmt: skip
    expansion_memory: int | None = field(
        default=None,
        metadata={"help": "most host memory for the copies of layers that stream (default: what is needed, with auto a "
                          "quarter of what is free)",
                  "size": True},
    )  # fmt: skip
    expansion_tier: str = _flag(  # type: ignore[assignment]
        "host", "with --kv-expansion, where layers stream from: peer borrows second copies of them from neighbours, "
        "and falls back to the host's", EXPANSION_TIERS,
    )  # fmt: skip
    long_prompts: bool = _flag(  # type: ignore[assignment]
        False, "with --kv-expansion, let one request fill the expanded pool: it then never shrinks below that"
    )
    seed: int = _flag(0, "seed of everything random")  # type: ignore[assignment]

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
