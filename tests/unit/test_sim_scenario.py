"""Scenarios: what is wrong is refused in one line with the key's path; what is set replaces what the file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from floodplain.core.errors import UserError
from floodplain.sim.scenario import make_scenario, read_scenario
from floodplain.sim.sets import sweep_of

GOOD: dict[str, Any] = {"model": "llama-3.1-8b", "device": "rtx4090"}
FILE = """
model: llama-3.1-8b
device: rtx4090
engine: {policy: fcfs, max_num_seqs: 64}
workload: {request_rate: 2, lengths: lengths.csv, seed: 5}
"""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"modell": "x"}, "modell: there is no such key (did you mean model?)"),
        ({"engine": {"polcy": "fcfs"}}, "engine.polcy: there is no such key (did you mean policy?)"),
        ({"engine": {"policy": "lifo"}}, "engine.policy: Input should be 'fcfs', 'cfs'"),
        ({"engine": {"max_num_seqs": -1}}, "engine.max_num_seqs: Input should be greater than or equal to 1"),
        ({"engine": {"max_gap": 0}}, "engine.max_gap: Input should be greater than 0"),
        ({"engine": {"max_gap": True}}, "engine.max_gap: true is no number"),
        ({"engine": {"max_gap": "nan"}}, "engine.max_gap: Input should be a finite number"),
        ({"workload": {"num_prompts": True}}, "workload.num_prompts: it cannot be true"),
        ({"engine": "fcfs"}, "engine: Input should be a valid dictionary, of lines KEY: VALUE"),
        ({"faults": [5]}, "faults.0: Input should be a valid dictionary, of lines KEY: VALUE"),
        ({"faults": {"at": 3}}, "faults: Input should be a list, such as [A, B]"),
        ({"servers": ["instance-0"]}, "servers.0: Input should be a list, such as [A, B]"),
        ({"cost": {"kernels": 5}}, "cost.kernels: Input should be a path"),
        ({"workload": {"trace": 5}}, "workload.trace: Input should be a path"),
        ({"cost": {"overhead_ms": "much"}}, "cost.overhead_ms: Input should be a valid number"),
        ({"swap": {"memory": "lots"}}, "swap.memory: 'lots' is no size"),
        ({"swap": {"memory": "1GB", "link": "usb"}}, "swap.link: no link is called 'usb'; there are pcie4"),
        ({"swap": {"memory": "1GB", "link": -1}}, "swap.link: -1 is no link: write pcie4, pcie5"),
        ({"swap": {"memory": "1GB", "link": True}}, "swap.link: True is no link: write pcie4, pcie5"),
        ({"swap": {"memory": "1GB", "link": {"a": 1}}}, "swap.link: {'a': 1} is no link: write pcie4, pcie5"),
        ({"model": "gpt-9"}, "no model shape is called 'gpt-9'; there are"),
        ({"device": "abacus"}, "no device is called 'abacus'; there are"),
        ({"tensor_parallel": 3}, "tensor_parallel: 32 heads and 8 KV heads do not divide evenly"),
        ({"tensor_parallel": 64}, "tensor_parallel: 32 heads and 8 KV heads do not divide evenly"),
        ({"lender": {"memory": "1GB", "busy": [[5, 5]]}}, "lender.busy: times must rise"),
        ({"lender": {"memory": "1GB", "link": "usb"}}, "lender.link: no link is called 'usb'"),
        ({"expansion": {"factor": 0.5}}, "expansion.factor: 0.5 is no factor: write auto, or a number from 1"),
        ({"expansion": {"factor": "much"}}, "expansion.factor: 'much' is no factor: write auto"),
        ({"expansion": {"link": "usb"}}, "expansion.link: no link is called 'usb'"),
        ({"faults": [{"at": 3, "instance": 1}]}, "faults: there is no instance 1: they count from 0 to 0"),
        ({"faults": [{"down": 3}]}, "faults.0.at: it is required"),
        ({"faults": [{"when": 3}]}, "faults.0.when: there is no such key; there are at, instance"),
        (
            {"faults": [{"at": 9}, {"at": 5, "down": 4}]},
            "faults.0: instance-0 is still down at 9 s: it is back at 9 s",
        ),
        (
            {"servers": [["instance-0"]], "faults": [{"at": 1}, {"at": 2, "server": 0}]},
            "faults.1: instance-0 is still down at 2 s: it is back at 31 s",
        ),
        ({"tenants": {"a": {"rate": 3}}}, "tenants.a.rate: there is no such key; there are trace"),
        (
            {"workload": {"request_rates": 3}},
            "workload.request_rates: there is no such key (did you mean request_rate?)",
        ),
        ({"workload": {"rate": 3}}, "workload.rate: there is no such key; there are trace, request_rate"),
        ({"workload": {"request_rate": -3}}, "workload: request_rate must be between"),
        ({"workload": {"num_prompts": "many"}}, "workload.num_prompts: Input should be a valid integer"),
        ({"workload": {"goodput": ["soon"]}}, "workload: goodput must read like ttft:500"),
    ],
)
def test_what_is_wrong_is_refused_with_its_path(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        make_scenario(GOOD | changes, "burst.yaml", Path())
    line = str(caught.value)
    assert line.startswith("burst.yaml: ") and words in line and "\n" not in line


def test_tenants_have_seeds_of_their_own() -> None:
    tenants = {"a": {}, "b": {"seed": 9}, "c": {}}
    scenario = make_scenario(GOOD | {"workload": {"seed": 5}, "tenants": tenants}, "s", Path())
    assert {name: spec.seed for name, spec in scenario.tenants.items()} == {"a": 5, "b": 9, "c": 7}


def test_a_misspelt_key_is_named_before_the_one_that_it_leaves_out() -> None:
    with pytest.raises(UserError, match=r"s: Model: there is no such key \(did you mean model\?\)"):
        make_scenario({"Model": "llama-3.1-8b", "device": "rtx4090"}, "s", Path())


@pytest.mark.parametrize("key", ["model", "device"])
def test_a_missing_key_is_refused_with_what_there_is(key: str) -> None:
    with pytest.raises(UserError, match=f"s: {key}: say which; there are .*(llama-3.1-8b|rtx4090)"):
        make_scenario({name: value for name, value in GOOD.items() if name != key}, "s", Path())


def test_a_file_is_read_and_its_paths_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "burst.yaml").write_text(FILE)
    scenario = read_scenario(tmp_path / "burst.yaml")
    assert scenario.workload.lengths == tmp_path / "lengths.csv" and scenario.workload.ignore_eos
    assert (scenario.engine.policy, scenario.engine.max_num_seqs, scenario.workload.seed) == ("fcfs", 64, 5)


def test_sets_replace_values_and_defaults_only_fill_gaps(tmp_path: Path) -> None:
    (tmp_path / "burst.yaml").write_text(FILE)
    scenario = read_scenario(
        tmp_path / "burst.yaml",
        ["engine.max_num_seqs=7", "swap.memory=1GiB", "workload.goodput=[ttft:900]"],
        ["engine.policy=cfs", "engine.max_num_seqs=9", "engine.block_tokens=32", "device=h200"],
    )
    assert (scenario.engine.policy, scenario.engine.max_num_seqs, scenario.engine.block_tokens) == ("fcfs", 7, 32)
    assert scenario.device.name == "rtx4090" and scenario.swap is not None and scenario.swap.memory == 2**30
    assert scenario.workload.goodput == ("ttft:900",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("engine.policy", "must read KEY=VALUE"),
        ("model.name=x", "--set model.name: model has no keys"),
        (f"engine={'[' * 20}1{']' * 20}", "--set engine, line 1: values are nested deeper"),
        ("engine.policy=*x", "--set engine.policy"),
    ],
)
def test_a_wrong_set_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "burst.yaml").write_text(FILE)
    with pytest.raises(UserError, match=words.replace("*", r"\*")):
        read_scenario(tmp_path / "burst.yaml", [text])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("engine.polcy=fcfs", "--set engine.polcy: there is no such key (did you mean policy?)"),
        ("engine={polcy: fcfs}", "--set engine.polcy: there is no such key (did you mean policy?)"),
        ("engin.policy=fcfs", "--set engin: there is no such key (did you mean engine?)"),
        ("engine.policy=lifo", "--set engine.policy: Input should be 'fcfs', 'cfs'"),
        ("workload.num_prompts=many", "--set workload.num_prompts: Input should be a valid integer"),
        ("engine.max_num_seqs=7", "{path}: engine.max_gap: Input should be greater than 0"),
    ],
)
def test_an_error_names_the_command_line_if_the_wrong_value_stands_there(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "burst.yaml"
    path.write_text(FILE if words.startswith("--set") else FILE.replace("policy: fcfs", "max_gap: 0"))
    with pytest.raises(UserError) as caught:
        read_scenario(path, [text])
    assert str(caught.value).startswith(words.format(path=path))


def test_a_sweep_is_every_combination() -> None:
    assert sweep_of([]) == [()]
    assert sweep_of(["a=1,2", "b.c=x,y"]) == [
        ("a=1", "b.c=x"), ("a=1", "b.c=y"), ("a=2", "b.c=x"), ("a=2", "b.c=y"),
    ]  # fmt: skip
    assert sweep_of(["a=[x,y],{b: [1,2], c: 3},5"]) == [("a=[x,y]",), ("a={b: [1,2], c: 3}",), ("a=5",)]
    with pytest.raises(UserError, match="--sweep names a twice"):
        sweep_of(["a=1", "a=2"])
    for text in ("=1,2", "a", "a=", "a=1,,2"):
        with pytest.raises(UserError, match="must read KEY=A,B,C"):
            sweep_of([text])
    with pytest.raises(UserError, match="more than 1000 runs"):
        sweep_of([f"{key}={','.join('0123456789')}" for key in "abcd"])
