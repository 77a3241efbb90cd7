"""The engine flags of the command line, declared once: name, type, default, help. ``EngineConfig`` checks them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from floodplain.cost.link import LINKS
from floodplain.lending.membership import DEADLINE_S
from floodplain.policy.lending import LendingSettings
from floodplain.policy.registry import DEFAULT_POLICY, POLICIES
from floodplain.policy.settings import FAIR_BY, SLICE_STEPS, SharingSettings

DTYPES = ("float32", "bfloat16")
SWAPS = ("none", "host", "peer")
HARDWARE_PREFIX = "emulated-"
HARDWARE = tuple(f"{HARDWARE_PREFIX}{name}" for name in LINKS)
EXPANSION_TIERS = (HOST_TIER, PEER_TIER) = ("host", "peer")
DEFAULT_RETURN_AFTER_S = 60.0
DEFAULT_LEND_AFTER_S = LendingSettings().calm_s
DEFAULT_LEASE_IDLE_S = 30.0
"""As long as the window of load by which a lender offers (``LendingSettings.window_s``)."""
DEFAULT_RECALL_DEADLINE_S = DEADLINE_S
_SHARING = SharingSettings()
_SLICES = ", ".join(f"{policy} {steps}" for policy, steps in SLICE_STEPS.items())


def _flag(
    default: object,
    help_text: str,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
    is_size: bool = False,
) -> Any:
    """A field that the command line shows as a flag. With ``is_size`` it reads values such as ``256MiB``."""
    return field(default=default, metadata={"help": help_text, "choices": choices, "metavar": metavar, "size": is_size})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """The flags, not checked. Sizes are bytes; the command line reads ``256MiB`` or ``4GB``."""

    model: str = field(
        metadata={
            "positional": True,
            "help": "name of the Hugging Face hub (@REVISION may follow), folder, .gguf file, smollm2, or dummy:NAME",
        }
    )
    policy: str = _flag(DEFAULT_POLICY, "who runs next if not all requests fit", POLICIES)
    slice: int | None = _flag(None, f"least steps that a request stays on the device (default: {_SLICES})")
    ttft_goal: float | None = _flag(
        None,
        "paced, timely: seconds to a first token (timely: five times what the median prompt takes without load; paced: "
        "newcomers then go first even where prompts are most of the work)",
    )
    tpot_goal: float | None = _flag(
        None,
        "paced, timely: seconds per token after the first one (default: five times what a token takes without load)",
    )
    pace: float | None = _flag(None, "paced, timely: the same in tokens per second")
    max_gap: float = _flag(
        _SHARING.max_gap_s, "paced, timely: newcomers wait while a stream has been silent for so many seconds"
    )
    line_patience: float = _flag(
        _SHARING.line_patience,
        "timely: a request whose first token cannot be in time waits at most so many times as long as it might have "
        "when all were served by arrival; more lets more requests be in time",
    )
    fair_by: str = _flag("request", "fair: whose work is counted", FAIR_BY)
    kv_memory: int | None = _flag(
        None,
        "memory of the KV pool, e.g. 512MiB (default: 1GiB on a CPU, 90%% of what is free on a GPU)",
        is_size=True,
    )
    block_tokens: int = _flag(16, "tokens in a KV block")
    max_batched_tokens: int = _flag(2048, "most tokens in one step")
    max_num_seqs: int = _flag(256, "most sequences on the device")
    max_waiting: int = _flag(4096, "most requests that wait; the next is refused (HTTP 429)")
    max_model_len: int | None = _flag(None, "most tokens of a request, prompt and output (default: the model's)")
    enable_prefix_caching: bool = _flag(True, "reuse KV blocks of equal prefixes")
    dtype: str = _flag("bfloat16", "number format of weights and KV", DTYPES)
    pack_weights: bool = _flag(
        True,
        "on a CPU, keep weight matrices in its own blocked layout (in float32 if it multiplies bfloat16 slowly): faster"
        ", but a layer's parameters cannot move",
    )
    device: str = _flag("cpu", "cpu, cuda or cuda:INDEX")
    swap: str = _flag("host", "where KV goes that must leave the device", SWAPS)
    swap_memory: int | None = _flag(
        None,
        "memory of the swap space (default: 8 KV pools, at most a quarter of what is free; CPU 2GiB)",
        is_size=True,
    )
    pin_sessions: bool = _flag(
        False,
        "copy KV of ended requests to swap space, and keep it for the session's next request as long as that is "
        "expected; live requests still have any slot",
    )
    peer_memory: int | None = _flag(
        None,
        "with --swap peer, most memory that is borrowed (default: as much as the swap space in host memory, which "
        "takes what finds no room)",
        is_size=True,
    )
    return_after: float = _flag(
        DEFAULT_RETURN_AFTER_S,
        "on a CPU, seconds without use after which memory of KV pool and swap space goes back to the system, with the "
        "prefixes in it; 0 keeps all",
    )
    hardware: str | None = _flag(
        None,
        "on a CPU, pace copies to swap space as this link would, slowed down by one factor for all links (default: as "
        "fast as this machine copies)",
        HARDWARE,
    )
    coordinator: str | None = _flag(
        None, "address of the coordinator of leases; of several, all with commas between", metavar="URL"
    )
    coordinator_token_file: str | None = _flag(
        None, "this engine's token for the coordinator, in a file of mode 0600", metavar="FILE"
    )
    device_name: str | None = _flag(
        None, "what the device is called among neighbours (default: host name and process id)", metavar="NAME"
    )
    lend: str = _flag(
        "off", "how much of the KV pool neighbours may borrow while it is idle: off, auto, or at most a size",
        metavar="SIZE",
    )  # fmt: skip
    lend_after: float = _flag(
        DEFAULT_LEND_AFTER_S, "seconds of calm before memory is lent; the other times of --lend go with it"
    )
    recall_deadline: float = _flag(
        DEFAULT_RECALL_DEADLINE_S, "with --lend, seconds that neighbours are given to return what is recalled"
    )
    profile: str | None = _flag(
        None, "with --lend auto, start from this profile of floodplain profile llm: its rate, its free bytes at most",
        metavar="FILE",
    )  # fmt: skip
    lease_look: float | None = _flag(
        None, "seconds between two looks of the step loop at its leases (default: 0.05 to lend, 0.02 to borrow)"
    )
    lease_idle: float = _flag(
        DEFAULT_LEASE_IDLE_S, "with --swap peer, seconds without use after which a lease is returned; 0 keeps all"
    )
    kv_expansion: str = _flag(
        "off", "let layers of the KV cache stream, so that its memory holds X times as many blocks, or as pays: auto",
        metavar="off|auto|X",
    )  # fmt: skip
    expansion_memory: int | None = _flag(
        None,
        "most host memory for the copies of layers that stream (default: what is needed, with auto a quarter of what "
        "is free)",
        is_size=True,
    )
    expansion_tier: str = _flag(
        "host", "with --kv-expansion, where layers stream from: peer borrows second copies of them from neighbours, "
        "and falls back to the host's", EXPANSION_TIERS,
    )  # fmt: skip
    long_prompts: bool = _flag(
        False, "with --kv-expansion, let one request fill the expanded pool: it then never shrinks below that"
    )
    seed: int = _flag(0, "seed of everything random")
