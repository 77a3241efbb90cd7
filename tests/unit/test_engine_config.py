"""Engine flags: refusals, before torch is imported where possible; defaults, and their sources."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from floodplain.cli.options import Parser, add_dataclass_flags, add_verb, dataclass_from, resolve
from floodplain.core.errors import UserError
from floodplain.cost.link import LINKS
from floodplain.engine import config
from floodplain.engine.config import HARDWARE, EngineConfig, check_early
from floodplain.lending.membership import DEADLINE_S
from floodplain.model.weights.open_model import open_model
from floodplain.model.weights.peek import peek_shape
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


# -- refusals before torch is imported ---------------------------------------------------------------------------------


PROGRAM = """
import contextlib, io, json, sys
from floodplain.cli.main import main

for argv in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = main(argv)
    imported = sorted({"torch", "transformers", "fastapi"} & sys.modules.keys())
    print(json.dumps([status, said.getvalue(), imported]))
"""


def test_flags_that_cannot_be_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    folder, broken, no_header = tmp_path / "folder", tmp_path / "broken", tmp_path / "m.gguf"
    folder.mkdir()
    broken.mkdir()
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    no_header.write_bytes(b"GGML" + bytes(60))
    two_instances, missing = ["dummy:tiny-llama", "--instances", "2"], str(tmp_path / "missing")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        wanted = [
            (["/nowhere"], "there is no model at '/nowhere'"),
            ([""], "there is no model at ''"),
            (["dummy:nothing"], "no model shape is called 'nothing'"),
            ([str(broken)], "config.json is missing"),
            ([str(folder)], "the tokenizer is missing"),
            ([str(no_header)], "cannot be read as a .gguf file"),
            (["dummy:tiny-llama", "--kv-memory", "500TiB"], "--kv-memory 500TiB is more than"),
            (["dummy:tiny-llama", "--swap-memory", "500TiB"], "--swap-memory 500TiB is more than"),
            (["dummy:tiny-llama", "--kv-memory", "10"], "--kv-memory 10B is less than one KV block of 4 KiB"),
            (["dummy:tiny-llama", "--swap-memory", "10"], "--swap-memory 10B is less than one KV block of 4 KiB"),
            (["dummy:tiny-llama", "--dtype", "int8"], "--dtype"),
            (["dummy:tiny-llama", "--hardware", "emulated-string"], "--hardware"),
            (["dummy:tiny-llama", "--api-key-file", str(tmp_path / "keys")], "cannot read the API key file"),
            (["dummy:tiny-llama", "--port", port], port),
            ([*two_instances, "--device-name", "d"], "--device-name d is for one engine"),
            ([*two_instances, "--device", "cuda:1"], "--device cuda:1 is one GPU"),
            ([*two_instances, "--pipeline", "--policy", "cfs"], "--policy cfs does not go with --pipeline"),
            ([*two_instances, "--pipeline", "--step-profile", missing], f"cannot read {missing}"),
            ([*two_instances, "--relief", "drop", "--kv-expansion", "2"], "--kv-expansion 2 does not go with --relief"),
            ([*two_instances, "--instance-token-file", missing], "cannot read the instance token file"),
        ]
        wanted = [(["serve", "--port", "0", *argv], message) for argv, message in wanted]
        for verb in (["bench", "offline"], ["profile", "llm"], ["profile", "step", "--out", str(tmp_path / "out")]):
            wanted.append(([*verb, "/nowhere"], "there is no model at '/nowhere'"))
            wanted.append(
                ([*verb, "dummy:tiny-llama", "--kv-memory", "10"], "--kv-memory 10B is less than one KV block")
            )
        for flag, problem in (("--max-concurrency", "must be at least 1"), ("--num-prompts", "must be between 1 and")):
            wanted.append((["bench", "offline", "dummy:tiny-llama", flag, "0"], f"{flag} {problem}"))
        argvs = json.dumps([argv for argv, _ in wanted])
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM, argvs], capture_output=True, text=True, check=True, timeout=60
        )
    for (argv, message), line in zip(wanted, ran.stdout.splitlines(), strict=True):
        status, said, imported = json.loads(line)
        assert (status, imported) == (2, []), (argv, said)
        assert message in said
        assert said.count("\n") == 1


def test_sizes_at_their_bounds_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of this model has 4,096 bytes in bfloat16 and 8,192 in float32."""
    monkeypatch.setattr(config, "available_bytes", lambda: 8192)
    check_early(EngineConfig(model="dummy:tiny-llama", kv_memory=4096, swap_memory=8192))
    check_early(EngineConfig(model="dummy:tiny-llama", kv_memory=2**40, device="cuda"))
    with pytest.raises(UserError, match="is less than one KV block of 8 KiB"):
        check_early(EngineConfig(model="dummy:tiny-llama", kv_memory=4096, dtype="float32"))


@pytest.mark.parametrize("model", ["dummy:tiny-llama", "dummy:tiny-opt", "smollm2"])
def test_the_shape_that_is_peeked_at_is_the_one_that_is_opened(model: str) -> None:
    assert peek_shape(model) == open_model(model).config.shape
