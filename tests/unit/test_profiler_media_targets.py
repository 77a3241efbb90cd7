"""Targets of a media profile by name, and refusals in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from floodplain.core.errors import UserError
from floodplain.profiler.media_targets import _batch_arguments, open_callable, open_module, open_pipeline

CPU = torch.device("cpu")
SOURCE = """
import torch

SEEN = []

def generate(batch):
    SEEN.append(batch)

class Holder:
    run = staticmethod(generate)

net = torch.nn.Linear(6, 2)

def make_net():
    return torch.nn.Linear(6, 2).double()

def fail():
    raise ValueError("no weights")

def leave():
    raise SystemExit(0)

number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the user's modules."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "users_model", raising=False)
    (tmp_path / "users_model.py").write_text(SOURCE)
    (tmp_path / "broken_model.py").write_text("import torch\n1 / 0\n")
    (tmp_path / "program.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["generate", "Holder.run"])
def test_a_function_of_the_current_folder_is_called_with_the_batch(name: str) -> None:
    open_callable(f"users_model:{name}")(5)
    assert sys.modules["users_model"].SEEN == [5]


@pytest.mark.parametrize(
    ("name", "dtype", "out"),
    [
        ("net", None, torch.float32),
        ("make_net", None, torch.float64),
        ("net", torch.bfloat16, torch.bfloat16),
    ],
)
def test_a_module_is_given_batches_of_its_shape_and_dtype(
    name: str, dtype: torch.dtype | None, out: torch.dtype
) -> None:
    result = open_module(f"users_model:{name}", (7, 6), CPU, dtype)(3)
    assert isinstance(result, torch.Tensor)
    assert (result.shape, result.dtype, result.requires_grad) == ((3, 7, 2), out, False)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("users_model", "must be MODULE:NAME"),
        (":generate", "must be MODULE:NAME"),
        ("no_such_model:generate", "cannot be imported (ModuleNotFoundError: No module named 'no_such_model')"),
        ("users_model:draw", "cannot be imported (AttributeError"),
        ("broken_model:generate", "cannot be imported (ZeroDivisionError: division by zero)"),
        ("program:generate", "cannot be imported (SystemExit: 0)"),
        ("users_model:number", "is no function"),
    ],
)
def test_what_is_no_function_is_refused(spec: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        open_callable(spec)
    assert str(caught.value).startswith(f"--target {spec} ") or str(caught.value).startswith(f"--target {spec}: ")
    assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("number", "is neither a torch module nor a function that makes one"),
        ("fail", "no weights"),
        ("leave", "SystemExit: 0"),
    ],
)
def test_what_is_no_module_is_refused(name: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        open_module(f"users_model:{name}", (6,), CPU, None)


def test_a_pipeline_gets_its_batch_by_the_argument_that_it_has() -> None:
    taken = {
        "prompt": {"prompt": ["a"] * 2}, "class_labels": {"class_labels": [0, 0]}, "batch_size": {"batch_size": 2},
    }  # fmt: skip
    for name, arguments in taken.items():
        batched = _batch_arguments({name: None, "other": None}, "a")
        assert batched is not None and batched(2) == arguments
    assert _batch_arguments({"image": None}, "a") is None


def test_a_pipeline_needs_its_folder_and_its_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--pipeline none: no such folder"):
        open_pipeline(Path("none"), CPU, torch.float32, "a", None, 0)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(UserError, match=r"^--pipeline needs diffusers, .*: pip install 'floodplain\[media\]'$"):
        open_pipeline(folder, CPU, torch.float32, "a", None, 0)
