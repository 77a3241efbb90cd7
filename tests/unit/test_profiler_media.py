"""Profiles of a callable with a fake clock and device: medians, out of memory, failures. Targets by name."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.profiler.knee import KneeSettings
from floodplain.profiler.media import (
    FITS,
    NOT_TRIED,
    OUT_OF_MEMORY,
    BatchTry,
    MediaFindings,
    MediaSettings,
    expected_bytes,
    is_out_of_memory,
    profile_media,
)
from floodplain.profiler.media_targets import _batch_arguments, open_callable, open_module, open_pipeline

MIB = 2**20
CPU_ERROR = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


@dataclass
class World:
    """A device of 1,000 MiB: 100 MiB for the model and 20 an item; a run takes 0.1 s, and 0.01 an item above eight.

    Attributes:
        slow: Extra seconds of the n-th run.
        fail: Called before each run.
    """

    machine: str = "a device"
    total_bytes: int = 1000 * MIB
    usual_dtype: torch.dtype = torch.float32
    is_fatal: bool = False
    now: float = 0.0
    batches: list[int] = field(default_factory=list)
    slow: Callable[[int], float] = lambda n: 0.0
    fail: Callable[[int], None] = lambda batch: None
    num_begun: int = 0
    _peak: int = 0

    def run(self, batch: int) -> object:
        self.fail(batch)
        self.batches.append(batch)
        self._peak = max(self._peak, (100 + 20 * batch) * MIB)
        self.now += 0.1 + 0.01 * max(0, batch - 8) + self.slow(len(self.batches))
        return object()

    def begin(self) -> None:
        self.num_begun += 1
        self._peak = 0

    def settle(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return self._peak

    def profile(self, tolerance: float = 0.1, **how: float) -> MediaFindings:
        knee = KneeSettings(tolerance=tolerance, resolution=0.0, max_batch=64)
        settings = MediaSettings(knee=knee, min_seconds=0.0, **how)  # type: ignore[arg-type]
        return profile_media(self.run, self, settings, lambda: self.now)


def test_the_knee_is_found_with_the_memory_that_is_used_and_free_there() -> None:
    found = World(total_bytes=2000 * MIB).profile()
    assert found.knee.is_saturated and found.knee.limit is None
    goal = max(each.throughput or 0.0 for each in found.tries) / 1.1
    assert found.knee.batch == next(b for b in range(9, 64) if b / (0.02 + 0.01 * b) >= goal)
    peak = (100 + 20 * found.knee.batch) * MIB
    assert (found.at_knee.peak_bytes, found.at_knee.free_bytes) == (peak, 2000 * MIB - peak)
    assert [each.batch for each in found.tries][:4] == [1, 2, 4, 8]


def test_an_odd_run_and_a_slow_warm_up_change_nothing() -> None:
    quiet = World().profile()
    odd = World(slow=lambda n: 5.0 if n % 4 in (1, 3) else 0.0).profile()
    assert odd.knee.throughput == pytest.approx(quiet.knee.throughput)
    assert (odd.knee.batch, odd.knee.limit) == (quiet.knee.batch, 64), (
        "each batch has a warm-up and three runs, one of them slow"
    )
    assert quiet.at_knee.spread == pytest.approx(0) and (odd.at_knee.spread or 0) > 1


def test_without_a_warm_up_and_with_one_run_it_would() -> None:
    odd = World(slow=lambda n: 5.0 if n > 3 else 0.0).profile(warmup=0, repeats=1)
    assert odd.knee.batch != World().profile().knee.batch
    assert odd.at_knee.spread is None


def test_runs_that_spread_by_more_than_the_tolerance_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        World(total_bytes=2000 * MIB).profile()
        assert not caplog.records
        World(total_bytes=2000 * MIB, slow=lambda n: 0.3 * (n % 2)).profile()
    assert "more than the tolerance of 10 %" in caplog.text


def test_runs_are_repeated_until_they_took_long_enough() -> None:
    world = World()
    settings = MediaSettings(knee=KneeSettings(max_batch=1), warmup=2, repeats=3, min_seconds=0.75)
    found = profile_media(world.run, world, settings, lambda: world.now)
    assert (found.at_knee.num_runs, len(world.batches)) == (8, 10)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), MemoryError(), RuntimeError(CPU_ERROR)])
def test_out_of_memory_is_an_answer(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    def fail(batch: int) -> None:
        if batch >= 7:
            raise error

    with caplog.at_level(logging.WARNING):
        found = World(fail=fail).profile()
    assert (found.knee.batch, found.knee.limit, found.knee.is_saturated) == (6, 7, False)
    assert {each.batch for each in found.tries if each.verdict == OUT_OF_MEMORY} == {8, 7}
    assert "still growing" in caplog.text


def test_what_takes_more_than_the_stated_memory_does_not_fit() -> None:
    found = World(total_bytes=(100 + 20 * 5) * MIB).profile()
    assert (found.knee.batch, found.knee.limit) == (5, 6)
    assert found.at_knee.free_bytes == 0


def test_where_running_out_of_memory_is_fatal_it_is_not_tried() -> None:
    world = World(total_bytes=(100 + 20 * 5) * MIB, is_fatal=True)
    found = world.profile()
    assert found.knee.limit == 6
    assert max(world.batches) == 5
    assert {each.batch for each in found.tries if each.verdict == NOT_TRIED} == {8, 6}


@given(st.integers(0, 2**40), st.integers(0, 2**30), st.sets(st.integers(1, 999), min_size=2), st.integers(1, 5000))
def test_memory_that_grows_evenly_is_foreseen(base: int, each: int, ran: set[int], batch: int) -> None:
    tries = [BatchTry(b, FITS, peak_bytes=base + b * each) for b in ran]
    expected = base + batch * each
    assert expected_bytes(tries, batch) == pytest.approx(expected, abs=1.0)
    assert expected_bytes([tries[0], BatchTry(7, OUT_OF_MEMORY)], batch) == 0.0, "one point is no line"


def test_another_failure_names_the_batch_and_the_line() -> None:
    def fail(batch: int) -> None:
        if batch > 2:
            raise KeyError("latents")

    with pytest.raises(UserError, match=rf"^a batch of 4 fails: KeyError: 'latents' \({Path(__file__).name}, line \d+"):
        World(fail=fail).profile()
    assert not is_out_of_memory(ValueError("out of memory"))


async def coroutine(batch: int) -> int:
    return batch


async def async_generator(batch: int) -> AsyncIterator[int]:
    yield batch


def generator(batch: int) -> Iterator[int]:
    yield batch


LAZY = [coroutine, async_generator, generator, lambda n: map(str, range(n)), lambda _: Future()]  # type: ignore[list-item, return-value]


@pytest.mark.parametrize("run", LAZY)
@pytest.mark.parametrize("warmup", [0, 1])
def test_work_that_is_not_done_when_the_call_returns_is_not_timed(run: Callable[[int], object], warmup: int) -> None:
    world = World()
    with warnings.catch_warnings(action="error"), pytest.raises(UserError, match="before its work is done: give a"):
        profile_media(run, world, MediaSettings(knee=KneeSettings(), warmup=warmup), lambda: world.now)


@pytest.mark.parametrize("result", [io.BytesIO(b"png"), [1], torch.ones(2), iter, None])
def test_work_that_is_done_is_timed_whatever_it_returns(result: object) -> None:
    """Negative control: a file is an iterator, too."""
    world = World()
    settings = MediaSettings(knee=KneeSettings(max_batch=1), min_seconds=0)
    assert profile_media(lambda _: result, world, settings, lambda: world.now).knee.batch == 1


@pytest.mark.parametrize("error", [SystemExit(0), BaseException("base")])
def test_a_batch_that_would_end_the_program_fails_as_others(error: BaseException) -> None:
    def fail(batch: int) -> None:
        raise error

    with pytest.raises(UserError, match=rf"^a batch of 1 fails: {type(error).__name__}: .* \(test_profiler_media.py"):
        World(fail=fail).profile()


def test_an_interruption_is_none_of_the_batch() -> None:
    def fail(batch: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        World(fail=fail).profile()


def test_a_device_too_small_for_one_item_is_refused() -> None:
    with pytest.raises(UserError, match="a batch of one does not fit into 100 MiB"):
        World(total_bytes=100 * MIB).profile()


@pytest.mark.parametrize("wrong", [{"warmup": -1}, {"repeats": 0}, {"min_seconds": -1.0}, {"repeats": 101}])
def test_bad_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"^--{next(iter(wrong)).replace('_', '-')} must be between"):
        MediaSettings(knee=KneeSettings(), **wrong)  # type: ignore[arg-type]


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
