"""Engine flags: refusals, defaults, and their sources."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from floodplain.cli.options import Parser, add_dataclass_flags, add_verb, dataclass_from, resolve
from floodplain.core.errors import UserError
from floodplain.cost.link import LINKS
from floodplain.engine.config import HARDWARE, EngineConfig
from floodplain.lending.membership import DEADLINE_S
from floodplain.policy.settings import SLICE_STEPS, SharingSettings, settings_for

NO_SWAP = {"swap": "none"}
URL = {"coordinator": "http://127.0.0.1:8100"}
PEER = URL | {"swap": "peer"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"swap": "disk"}, "^--swap must be one of none, host, peer, not 'disk'$"),
        (NO_SWAP | {"swap_memory": 2**20}, "^--swap-memory says how to swap, and --swap none does not"),
        (NO_SWAP | {"hardware": "emulated-c2c"}, "^--hardware says how to swap, and --swap none does not"),
        ({"policy": "lifo"}, "^--policy must be one of fcfs, cfs, fair, paced, timely, not 'lifo'$"),
        ({"slice": 0}, "^--slice must be between 1 and 10000 steps, not 0$"),
        ({"pace": -1.0}, "^--pace must be above 0 tokens per second, not -1.0$"),
        ({"ttft_goal": 0.0}, "^--ttft-goal must be above 0 seconds, not 0.0$"),
        ({"tpot_goal": math.inf}, "^--tpot-goal must be above 0 seconds, not inf$"),
        ({"tpot_goal": 0.1, "pace": 5.0}, "^--pace and --tpot-goal say the same thing: leave one out$"),
        ({"max_gap": 0.0}, "^--max-gap must be above 0 seconds, not 0.0$"),
        ({"fair_by": "user"}, "^--fair[-_]by must be one of request, key, not 'user'$"),
        ({"slice": "5"}, "^--slice must be a whole number, not '5'$"),
        ({"slice": 2.5}, "^--slice must be a whole number, not 2.5$"),
        ({"pace": "3"}, "^--pace must be a number, not '3'$"),
        ({"max_gap": True}, "^--max-gap must be a number, not True$"),
        ({"device": 0}, "^--device must be a word, not 0$"),
        ({"seed": "x"}, "^--seed must be a whole number, not 'x'$"),
        ({"seed": None}, "^--seed must be a whole number, not None$"),
        ({"enable_prefix_caching": "no"}, "^--enable-prefix-caching must be True or False, not 'no'$"),
        ({"swap": "host", "swap_memory": 0}, "--swap-memory must be a whole number of at least 1"),
        ({"swap": "host", "swap_memory": "1GiB"}, "--swap-memory must be a whole number of at least 1"),
        ({"swap": "none", "pin_sessions": True}, "^--pin-sessions says how to swap, and --swap none does not: "),
        ({"pin_sessions": True, "enable_prefix_caching": False}, "^--pin-sessions keeps prefixes, and --no-enable-"),
        ({"swap": "host", "hardware": "pcie4"}, "--hardware must be one of emulated-pcie4, .*c2c, not 'pcie4'"),
        ({"swap": "host", "hardware": "emulated-c2c", "device": "cuda:0"}, "leave it out with --device cuda"),
        ({"swap": "peer", "device": "cuda:1"}, "^--swap peer needs --coordinator: it knows which devices lend memory$"),
        ({"lend": "auto"}, "^--lend auto needs --coordinator: it tells borrowers of lent memory$"),
        ({"lend": "64MiB"}, "^--lend 64MiB needs --coordinator"),
        (URL | {"lend": "some"}, "^--lend must be off, auto, or a size: 'some' is no size"),
        (URL | {"lend": "0"}, "^--lend must be off, auto, or a size: '0' is out of range"),
        (URL | {"lend": 2**20}, "^--lend must be a word, not 1048576$"),
        ({"lend_after": 2.0}, "^--lend-after says when to lend, and --lend off does not: leave one of them out$"),
        (URL | {"lend": "auto", "lend_after": 0.01}, "^--lend-after must be between 0.1 and 86400 s, not 0.01$"),
        (URL | {"lend": "auto", "lend_after": math.nan}, "^--lend-after must be between 0.1 and 86400 s, not nan$"),
        ({"recall_deadline": 2.0}, "^--recall-deadline says how to recall, and --lend off lends nothing: leave one of"),
        (URL | {"lend": "auto", "recall_deadline": 0.4}, "^--recall-deadline must be between 0.5 and 86400 s, not 0.4"),
        (URL | {"lend": "auto", "recall_deadline": math.nan}, "^--recall-deadline must be between 0.5 and 86400"),
        (URL | {"lend": "auto", "recall_deadline": "3"}, "^--recall-deadline must be a number, not '3'$"),
        ({"profile": "p.json"}, "^--profile says what --lend auto starts from, and --lend is off: change one of them$"),
        (URL | {"lend": "64MiB", "profile": "p.json"}, "^--profile says what --lend auto starts from, and --lend is"),
        ({"lease_idle": 2.0}, "^--lease-idle says when to return what was borrowed, and --swap host borrows nothing: "),
        (PEER | {"lease_idle": 0.01}, "^--lease-idle must be between 0.1 and 86400 s, or 0 to return nothing, not"),
        (PEER | {"lease_idle": math.inf}, "^--lease-idle must be between 0.1 and 86400 s, or 0 to return nothing, not"),
        (PEER | {"lease_idle": "off"}, "^--lease-idle must be a number, not 'off'$"),
        ({"lease_look": 0.1}, "^--lease-look needs --coordinator: without one there are no leases to look at$"),
        (URL | {"lease_look": 2.0}, "^--lease-look must be between 0.001 and 1 s, not 2.0: rarer looks would let"),
        (URL | {"lease_look": 0}, "^--lease-look must be between 0.001 and 1 s, not 0"),
        ({"kv_expansion": "much"}, "^--kv-expansion must be off, auto, or a number above 1, not 'much'$"),
        ({"kv_expansion": "0.5"}, "^--kv-expansion must be off, auto, or a number above 1, not '0.5'$"),
        ({"kv_expansion": "inf"}, "^--kv-expansion must be off, auto, or a number above 1"),
        ({"expansion_memory": 2**30}, "^--expansion-memory says how to expand, and --kv-expansion off does not"),
        ({"expansion_tier": "peer"}, "^--expansion-tier says how to expand, and --kv-expansion off does not"),
        ({"expansion_tier": "peer", "kv_expansion": "auto"}, "^--expansion-tier peer needs --coordinator"),
        ({"expansion_tier": "far"}, "^--expansion-tier must be one of host, peer, not 'far'$"),
        ({"long_prompts": True}, "^--long-prompts says how to expand, and --kv-expansion off does not"),
        (
            {"long_prompts": True, "kv_expansion": "auto"},
            "^--long-prompts with --kv-expansion auto needs --max-model-len: how long may a request be[?]$",
        ),
        (
            {"kv_expansion": "2", "lend": "auto", "coordinator": "http://h"},
            "^--kv-expansion 2 takes the pages of layers, and --lend auto gives the same pages away: leave one of",
        ),
        ({"coordinator_token_file": "f"}, "^--coordinator-token-file needs --coordinator: the token is sent to it$"),
        ({"coordinator": 8100}, "^--coordinator must be a word, not 8100$"),
        ({"device_name": "a/b"}, "^--device-name 'a/b' must be 1 to 64 letters, digits, '.', '_' or '-'$"),
        ({"device_name": "x" * 65}, "^--device-name 'x+' must be 1 to 64 letters"),
    ],
)  # fmt: skip
def test_bad_flags_are_one_line_that_names_the_problem(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        EngineConfig(model="m", **flags)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:3"])
def test_every_device_may_borrow_and_lend(device: str) -> None:
    config = EngineConfig(model="m", device=device, swap="peer", peer_memory=2**30, lend="auto", **URL)  # type: ignore[arg-type]
    assert (config.swap, config.lends) == ("peer", True)


def test_a_step_must_have_a_token_for_every_stream() -> None:
    with pytest.raises(UserError, match="--max-batched-tokens 100 must be at least --max-num-seqs 256"):
        EngineConfig(model="m", max_batched_tokens=100)
    EngineConfig(model="m", max_batched_tokens=100, max_num_seqs=100)


@pytest.mark.parametrize("policy", SLICE_STEPS)
def test_flags_that_are_left_out_mean_the_policies_own_defaults(policy: str) -> None:
    assert EngineConfig(model="m", policy=policy).sharing_settings() == settings_for(policy)


def test_slices_are_the_policys_own_unless_set() -> None:
    assert len(set(SLICE_STEPS.values())) == len(SLICE_STEPS)
    for policy, steps in SLICE_STEPS.items():
        assert EngineConfig(model="m", policy=policy).sharing_settings().slice_steps == steps
        assert EngineConfig(model="m", policy=policy, slice=5).sharing_settings().slice_steps == 5
    assert settings_for("fair", fair_by="key") == SharingSettings(slice_steps=SLICE_STEPS["fair"], fair_by="key")


@pytest.mark.parametrize(
    ("policy", "unused"),
    [
        ("fcfs", ["--slice", "--ttft-goal", "--pace", "--max-gap", "--fair-by"]),
        ("cfs", ["--ttft-goal", "--pace", "--max-gap", "--fair-by"]),
        ("fair", ["--ttft-goal", "--pace", "--max-gap"]),
        ("paced", ["--fair-by"]),
    ],
)
def test_what_a_policy_has_no_use_for_is_known(policy: str, unused: list[str]) -> None:
    assert not EngineConfig(model="m", policy=policy).unused_flags()
    every = {"slice": 9, "ttft_goal": 9, "pace": 9, "max_gap": 9, "fair_by": "key"}
    assert EngineConfig(model="m", policy=policy, **every).unused_flags() == unused  # type: ignore[arg-type]


def test_every_named_link_can_be_emulated() -> None:
    assert [f"emulated-{name}" for name in LINKS] == list(HARDWARE)
    for name in HARDWARE:
        assert EngineConfig(model="m", swap="host", hardware=name).hardware == name


def test_swap_flags_come_from_the_command_line() -> None:
    parser = add_verb(Parser(prog="x").add_subparsers(), "verb", "A verb.")
    add_dataclass_flags(parser, EngineConfig)
    line = "m --swap host --swap-memory 1.5GiB --hardware emulated-nvlink4"
    config = dataclass_from(resolve(parser, line.split(), {}), EngineConfig)
    assert config == EngineConfig(model="m", swap="host", swap_memory=3 * 2**29, hardware="emulated-nvlink4")
    assert dataclass_from(resolve(parser, ["m"], {}), EngineConfig).swap == "host"
    assert all(action.help for action in parser._actions)


@pytest.mark.parametrize(
    ("lend", "most_bytes"), [("off", 0), ("auto", None), ("64MiB", 2**26), ("1048576", 2**20)]
)  # fmt: skip
def test_how_much_may_be_lent(lend: str, most_bytes: int | None) -> None:
    config = EngineConfig(model="m", coordinator="http://x", lend=lend)
    assert config.most_lent_bytes == most_bytes
    assert config.lends is (lend != "off")


@pytest.mark.parametrize("word", ["off", "auto", "64MiB", "'off'"])
def test_lending_flags_come_from_a_file_whatever_yaml_takes_the_word_for(word: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"coordinator: http://x\nlend: {word}\ndevice-name: gpu0\n")
    parser = add_verb(Parser(prog="x").add_subparsers(), "verb", "A verb.")
    add_dataclass_flags(parser, EngineConfig)
    config = dataclass_from(resolve(parser, ["m", "--config", str(tmp_path / "c.yaml")], {}), EngineConfig)
    assert config.lend == word.strip("'")
    assert (config.coordinator, config.device_name) == ("http://x", "gpu0")


def test_the_recall_deadline_is_a_flag_as_others_are(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("coordinator: http://x\nlend: auto\nrecall-deadline: 3\n")
    parser = add_verb(Parser(prog="x").add_subparsers(), "verb", "A verb.")
    add_dataclass_flags(parser, EngineConfig)
    in_file, in_environ = ["m", "--config", str(tmp_path / "c.yaml")], {"FLOODPLAIN_RECALL_DEADLINE": "4"}

    def read(argv: list[str], environ: dict[str, str]) -> float:
        return dataclass_from(resolve(parser, argv, environ), EngineConfig).recall_deadline

    assert read(["m"], {}) == DEADLINE_S
    assert read(in_file, {}) == 3
    assert read(in_file, in_environ) == 4
    assert read([*in_file, "--recall-deadline", "5"], in_environ) == 5


@pytest.mark.parametrize("seconds", [0, 0.1, 30.0, 86400])
def test_borrowed_memory_is_returned_after_a_while_or_never(seconds: float) -> None:
    assert EngineConfig(model="m", lease_idle=seconds, **PEER).lease_idle == seconds  # type: ignore[arg-type]
