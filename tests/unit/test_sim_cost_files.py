"""Tables of kernels as files: what they say is what a step costs, and what is wrong names its file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from floodplain.core.errors import UserError
from floodplain.cost.kernels import MAX_TOKENS
from floodplain.cost.model_shape import shape_named
from floodplain.sim.cost_files import read_kernels
from floodplain.sim.machine import resolve_machine
from floodplain.sim.scenario import make_scenario

MODEL, EXPERTS = shape_named("tiny-llama"), shape_named("qwen3-30b-a3b")
NAMES = ("qkv_proj", "o_proj", "embedding", "final_layernorm")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tables in which every kernel takes 10 microseconds, and experts 1 for each that is activated."""
    tables = {
        "dense.csv": ["layer,tokens,time_us", *(f"{name},{tokens},10" for name in NAMES for tokens in (1, 64))],
        "attention.csv": [
            "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us",
            *(f"{c},{b},{n},{d},10" for c in (16, 32) for b in (0, 16) for n in (1, 2) for d in (16, 32)),
            *(f"{c},{b},0,0,10" for c in (16, 32) for b in (0, 16)),
            *(f"0,0,{n},{d},10" for n in (1, 2) for d in (16, 32)),
        ],
        "per_sequence.csv": ["layer,sequences,time_us", "lm_head,1,10", "lm_head,4,10"],
        "moe.csv": ["tokens,activated_experts,time_us", "1,8,8", "64,64,64", "64,128,128"],
    }
    for name, lines in tables.items():
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    return tmp_path


def test_a_step_is_the_sum_of_its_kernels(folder: Path) -> None:
    cost = read_kernels(folder, MODEL, {}, overhead_s=1e-3, max_num_seqs=64)
    kernels = MODEL.num_layers * 3 + 2 + 1  # two dense ones and attention a layer; two once; one for the sampled token
    assert cost.batch_s([20], [], 1) == pytest.approx(1e-3 + kernels * 1e-5)
    two = read_kernels(folder, MODEL, {1: 5e-6, 64: 5e-6}, overhead_s=0.0, max_num_seqs=64)
    assert two.batch_s([20], [], 1) == pytest.approx((kernels + MODEL.num_layers) * 1e-5)


def test_experts_cost_what_the_activated_ones_do(folder: Path) -> None:
    cost = read_kernels(folder, EXPERTS, {}, overhead_s=0.0, max_num_seqs=64)
    plain = EXPERTS.num_layers * 3 + 3
    assert cost.batch_s([20], [], 1) == pytest.approx(plain * 1e-5 + EXPERTS.num_layers * 8e-6)
    active = EXPERTS.count_active_experts(64)
    assert cost.batch_s([20] * 64, [], 4) == pytest.approx(plain * 1e-5 + EXPERTS.num_layers * active * 1e-6)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("dense.csv", lambda text: text.replace("tokens", "n", 1), "dense.csv has no column tokens"),
        ("dense.csv", lambda text: text.replace("qkv_proj", "proj"), "the table of dense kernels lacks qkv_proj"),
        ("attention.csv", lambda text: text.replace("16,0,1", "many,0,1"), "attention.csv: 'many' is no whole number"),
        ("per_sequence.csv", lambda text: text.replace(",10", ",-10"), "per_sequence.csv: '-10' is no time"),
    ],
)
def test_what_is_wrong_names_its_file(folder: Path, name: str, change: Callable[[str], str], words: str) -> None:
    (folder / name).write_text(change((folder / name).read_text()))
    with pytest.raises(UserError, match=words) as caught:
        read_kernels(folder, MODEL, {}, overhead_s=0.0, max_num_seqs=64)
    assert str(caught.value).startswith((str(folder), "cannot"))


def test_a_missing_table_is_named(folder: Path) -> None:
    (folder / "moe.csv").unlink()
    read_kernels(folder, MODEL, {}, overhead_s=0.0, max_num_seqs=64)
    with pytest.raises(UserError, match=r"moe\.csv"):
        read_kernels(folder, EXPERTS, {}, overhead_s=0.0, max_num_seqs=64)


def test_steps_beyond_the_tables_end_are_refused_before_they_are_read(folder: Path) -> None:
    scenario = {"model": "tiny-llama", "device": "rtx4090", "cost": {"kernels": "."}}
    resolve_machine(make_scenario(scenario | {"engine": {"max_batched_tokens": MAX_TOKENS}}, "s", folder))
    for name in ("max_batched_tokens", "max_num_seqs"):
        wide = make_scenario(scenario | {"engine": {name: MAX_TOKENS + 1}}, "s", folder)
        with pytest.raises(UserError, match=rf"engine\.{name}: cost\.kernels prices steps of at most 16384, not 16385"):
            resolve_machine(wide)
