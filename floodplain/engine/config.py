"""Configuration of one engine: its flags, each declared once (name, type, default, help), and their checks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

from floodplain.core.errors import SettingRefused, UserError, flag_name
from floodplain.core.flags import changed, check_between, check_choices, flag
from floodplain.core.sizes import format_size, parse_size, show_size
from floodplain.cost.link import LINKS
from floodplain.lending.membership import DEADLINE_S
from floodplain.memory.host.named_file import NAME
from floodplain.memory.host_memory import available_bytes
from floodplain.model.weights.peek import peek_shape
from floodplain.policy.lending import LendingSettings
from floodplain.policy.registry import DEFAULT_POLICY, POLICIES
from floodplain.policy.settings import FAIR_BY, SLICE_STEPS, SharingSettings, settings_for

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a value in each number format."""
SWAPS = ("none", "host", "peer")
HARDWARE_PREFIX = "emulated-"
HARDWARE = tuple(f"{HARDWARE_PREFIX}{name}" for name in LINKS)
EXPANSION_TIERS = ("host", "peer")
_SHARING = SharingSettings()
_SLICES = ", ".join(f"{policy} {steps}" for policy, steps in SLICE_STEPS.items())

MAX_BLOCK_TOKENS = 1024
_COUNTS = (
    "block_tokens", "max_batched_tokens", "max_num_seqs", "max_waiting", "kv_memory", "max_model_len", "swap_memory",
    "peer_memory", "expansion_memory",
)  # fmt: skip
_USED_BY = {
    "slice": ("cfs", "fair", "paced", "timely"), "fair_by": ("fair",), "line_patience": ("timely",),
    **dict.fromkeys(("ttft_goal", "tpot_goal", "pace", "max_gap"), ("paced", "timely")),
}  # fmt: skip
"""Policies that use a flag, if not all do."""
_IDLE: Mapping[str, tuple[str, tuple[str, ...], str, str]] = {
    **dict.fromkeys(("swap_memory", "hardware", "pin_sessions"), ("swap", ("none",), "how to swap", "does not")),
    "peer_memory": ("swap", ("none", "host"), "how much to borrow", "does not"),
    "lease_idle": ("swap", ("none", "host"), "when to return what was borrowed", "borrows nothing"),
    "lend_after": ("lend", ("off",), "when to lend", "does not"),
    "recall_deadline": ("lend", ("off",), "how to recall", "lends nothing"),
    **dict.fromkeys(
        ("expansion_memory", "expansion_tier", "long_prompts"), ("kv_expansion", ("off",), "how to expand", "does not")
    ),
}
"""Flags without effect at some values of another flag: its name, these values, and the verbs of the refusal."""
_NOUNS = {int: "a whole number", float: "a number", str: "a word", bool: "True or False"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine flags, resolved: saved beside every result, never changed.

    Sizes are bytes; the command line reads ``256MiB`` or ``4GB``. Raises UserError, which names the flag.
    """

    model: str = field(
        metadata={
            "positional": True,
            "help": "name of the Hugging Face hub (@REVISION may follow), folder, .gguf file, smollm2, or dummy:NAME",
        }
    )
    policy: str = flag(DEFAULT_POLICY, "who runs next if not all requests fit", choices=POLICIES)
    slice: int | None = flag(None, f"least steps that a request stays on the device (default: {_SLICES})")
    ttft_goal: float | None = flag(
        None,
        "paced, timely: seconds to a first token (timely: five times what the median prompt takes without load; paced: "
        "newcomers then go first even where prompts are most of the work)",
    )
    tpot_goal: float | None = flag(
        None,
        "paced, timely: seconds per token after the first one (default: five times what a token takes without load)",
    )
    pace: float | None = flag(None, "paced, timely: the same in tokens per second")
    max_gap: float = flag(
        _SHARING.max_gap_s, "paced, timely: newcomers wait while a stream has been silent for so many seconds"
    )
    line_patience: float = flag(
        _SHARING.line_patience,
        "timely: a request whose first token cannot be in time waits at most so many times as long as it might have "
        "when all were served by arrival; more lets more requests be in time",
    )
    fair_by: str = flag("request", "fair: whose work is counted", choices=FAIR_BY)
    kv_memory: int | None = flag(
        None,
        "memory of the KV pool, e.g. 512MiB (default: 1GiB on a CPU, 90%% of what is free on a GPU)",
        size=True,
    )
    block_tokens: int = flag(16, "tokens in a KV block")
    max_batched_tokens: int = flag(2048, "most tokens in one step")
    max_num_seqs: int = flag(256, "most sequences on the device")
    max_waiting: int = flag(4096, "most requests that wait; the next is refused (HTTP 429)")
    max_model_len: int | None = flag(None, "most tokens of a request, prompt and output (default: the model's)")
    enable_prefix_caching: bool = flag(True, "reuse KV blocks of equal prefixes")
    dtype: str = flag("bfloat16", "number format of weights and KV", choices=tuple(DTYPE_BYTES))
    pack_weights: bool = flag(
        True,
        "on a CPU, keep weight matrices in its own blocked layout (in float32 if it multiplies bfloat16 slowly): faster"
        ", but a layer's parameters cannot move",
    )
    device: str = flag("cpu", "cpu, cuda or cuda:INDEX")
    swap: str = flag("host", "where KV goes that must leave the device", choices=SWAPS)
    swap_memory: int | None = flag(
        None,
        "memory of the swap space (default: 8 KV pools, at most a quarter of what is free; CPU 2GiB)",
        size=True,
    )
    pin_sessions: bool = flag(
        False,
        "copy KV of ended requests to swap space, and keep it for the session's next request as long as that is "
        "expected; live requests still have any slot",
    )
    peer_memory: int | None = flag(
        None,
        "with --swap peer, most memory that is borrowed (default: as much as the swap space in host memory, which "
        "takes what finds no room)",
        size=True,
    )
    return_after: float = flag(
        60.0,
        "on a CPU, seconds without use after which memory of KV pool and swap space goes back to the system, with the "
        "prefixes in it; 0 keeps all",
    )
    hardware: str | None = flag(
        None,
        "on a CPU, pace copies to swap space as this link would, slowed down by one factor for all links (default: as "
        "fast as this machine copies)",
        choices=HARDWARE,
    )
    coordinator: str | None = flag(
        None, "address of the coordinator of leases; of several, all with commas between", metavar="URL"
    )
    coordinator_token_file: str | None = flag(
        None, "this engine's token for the coordinator, in a file of mode 0600", metavar="FILE"
    )
    device_name: str | None = flag(
        None, "what the device is called among neighbours (default: host name and process id)", metavar="NAME"
    )
    lend: str = flag(
        "off", "how much of the KV pool neighbours may borrow while it is idle: off, auto, or at most a size",
        metavar="SIZE",
    )  # fmt: skip
    lend_after: float = flag(
        LendingSettings().calm_s, "seconds of calm before memory is lent; the other times of --lend go with it"
    )
    recall_deadline: float = flag(
        DEADLINE_S, "with --lend, seconds that neighbours are given to return what is recalled"
    )
    profile: str | None = flag(
        None, "with --lend auto, start from this profile of floodplain profile llm: its rate, its free bytes at most",
        metavar="FILE",
    )  # fmt: skip
    lease_look: float | None = flag(
        None, "seconds between two looks of the step loop at its leases (default: 0.05 to lend, 0.02 to borrow)"
    )
    lease_idle: float = flag(  # the default is the window of load by which a lender offers
        30.0, "with --swap peer, seconds without use after which a lease is returned; 0 keeps all"
    )
    kv_expansion: str = flag(
        "off", "let layers of the KV cache stream, so that its memory holds X times as many blocks, or as pays: auto",
        metavar="off|auto|X",
    )  # fmt: skip
    expansion_memory: int | None = flag(
        None,
        "most host memory for the copies of layers that stream (default: what is needed, with auto a quarter of what "
        "is free)",
        size=True,
    )
    expansion_tier: str = flag(
        "host", "with --kv-expansion, where layers stream from: peer borrows second copies of them from neighbours, "
        "and falls back to the host's", choices=EXPANSION_TIERS,
    )  # fmt: skip
    long_prompts: bool = flag(
        False, "with --kv-expansion, let one request fill the expanded pool: it then never shrinks below that"
    )
    seed: int = flag(0, "seed of everything random")

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(EngineConfig).items():
            _check_type(name, getattr(self, name), get_args(hint) or (hint,))
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{flag_name(name)} must be a whole number of at least 1, not {value!r}")
        if self.max_batched_tokens < self.max_num_seqs:
            raise UserError(
                f"--max-batched-tokens {self.max_batched_tokens} must be at least --max-num-seqs {self.max_num_seqs}: "
                "each stream gets a token in every step"
            )
        if self.block_tokens > MAX_BLOCK_TOKENS:
            raise UserError(f"--block-tokens must be at most {MAX_BLOCK_TOKENS}, not {self.block_tokens}")
        check_choices(self)
        if self.max_model_len is not None and self.max_model_len < 2:
            raise UserError(f"--max-model-len must be at least 2, not {self.max_model_len}")
        if not 0 <= self.return_after < math.inf:
            raise UserError(f"--return-after must be a number of seconds of at least 0, not {self.return_after!r}")
        if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", self.device):
            raise UserError(f"--device must be cpu, cuda or cuda:INDEX, not {self.device!r}")
        self._check_swap()
        self._check_leases()
        self._check_idle_flags()
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
        return [flag_name(name) for name in changed(self) if self.policy not in _USED_BY.get(name, (self.policy,))]

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
        if self.pin_sessions and not self.enable_prefix_caching:
            raise UserError(
                "--pin-sessions keeps prefixes, and --no-enable-prefix-caching reuses none: leave one of them out"
            )
        if self.hardware is not None and self.device != "cpu":
            raise UserError(f"--hardware {self.hardware} emulates a link on a CPU: leave it out with --device cuda")

    def _check_leases(self) -> None:
        lent_bytes = self.most_lent_bytes
        if self.coordinator is None:
            self._check_alone(lent_bytes)
        if self.lease_look is not None and not 0.001 <= self.lease_look <= 1:
            limits = f"between 0.001 and 1 s, not {self.lease_look}"
            raise UserError(f"--lease-look must be {limits}: rarer looks would let deadlines pass")
        check_between(self, "lend_after", 0.1, 86400, "s")
        check_between(self, "recall_deadline", 0.5, 86400, "s")  # consumers take their last resort 0.25 s before it
        if self.lease_idle != 0 and not 0.1 <= self.lease_idle <= 86400:
            limits = f"between 0.1 and 86400 s, or 0 to return nothing, not {self.lease_idle}"
            raise UserError(f"--lease-idle must be {limits}")
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

    def _check_idle_flags(self) -> None:
        given = changed(self)
        for name, (other, values, says, but) in _IDLE.items():
            value = getattr(self, other)
            if name in given and value in values:
                flags = f"{flag_name(name)} says {says}, and {flag_name(other)} {value} {but}"
                raise UserError(f"{flags}: leave one of them out")

    def _check_expansion(self) -> None:
        expansion = self.asked_expansion
        if expansion == 1.0:
            return
        if self.lend != "off":
            raise UserError(
                f"--kv-expansion {self.kv_expansion} takes the pages of layers, and --lend {self.lend} gives the same "
                "pages away: leave one of them out"
            )
        if self.expansion_tier == "peer" and self.coordinator is None:
            raise UserError("--expansion-tier peer needs --coordinator: it alone knows which neighbours lend memory")
        if self.long_prompts and expansion is None and self.max_model_len is None:
            raise UserError("--long-prompts with --kv-expansion auto needs --max-model-len: how long may a request be?")


def _check_type(name: str, value: Any, kinds: tuple[type, ...]) -> None:
    """Check the type of a field: Python callers may pass any, while the command line has parsed its values."""
    if type(value) in kinds or (type(value) is int and float in kinds) or (isinstance(value, str) and str in kinds):
        return
    at_least = " of at least 1" if name in _COUNTS else ""
    raise UserError(f"{flag_name(name)} must be {_NOUNS[kinds[0]]}{at_least}, not {value!r}")


def check_early(config: EngineConfig) -> None:
    """Check as ``check_sizes``, and that memory sizes fit the machine. Raises UserError."""
    if config.device == "cpu":
        available = available_bytes()
        for name, size in _asked_sizes(config).items():
            if size > available:
                asked_size, free = format_size(size), show_size(available)
                raise UserError(f"{name} {asked_size} is more than the {free} that this machine has free: lower it")
    check_sizes(config)


def check_sizes(config: EngineConfig) -> None:
    """Check that the model exists, and that memory sizes hold a KV block. Raises UserError."""
    block_bytes = config.block_tokens * peek_shape(config.model).kv_bytes_per_token(DTYPE_BYTES[config.dtype])
    for name, size in _asked_sizes(config).items():
        if size < block_bytes:
            least = show_size(block_bytes)
            raise UserError(f"{name} {format_size(size)} is less than one KV block of {least}: raise it")


def expect_no_keys(config: EngineConfig, command: str) -> None:
    """Raise UserError if fairness is by API key: ``command`` has no clients with keys."""
    if config.fair_by == "key":
        raise UserError(f"--fair-by key needs clients with keys, and {command} has none: use serve --api-key-file")


def _asked_sizes(config: EngineConfig) -> dict[str, int]:
    sizes = {"--kv-memory": config.kv_memory, "--swap-memory": config.swap_memory}
    return {name: size for name, size in sizes.items() if size is not None}
