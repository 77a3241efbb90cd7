"""``floodplain profile media``: the batch at which throughput saturates, and the memory that is free there."""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from floodplain.cli.options import add_verb, dataclass_from
from floodplain.cluster.launch.parent import signal_at_parents_end
from floodplain.core.errors import UserError
from floodplain.core.flags import flag
from floodplain.files.results import check_writable
from floodplain.observe.profile import save_and_show
from floodplain.profiler.flags import DEFAULT_THRESHOLD_BYTES

if TYPE_CHECKING:
    import torch

    from floodplain.files.profile import Profile
    from floodplain.profiler.media import MediaFindings
    from floodplain.profiler.media_targets import BatchRun
    from floodplain.profiler.meters import MemoryMeter

DTYPES = ("float32", "bfloat16", "float16")
_WAYS = ("target", "pipeline", "module")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """The flags of the verb. Raises UserError if flags contradict each other."""

    target: str | None = flag(
        None, "measure this function, which computes a batch of the size that it is given", metavar="MODULE:FUNCTION"
    )
    pipeline: Path | None = flag(None, "measure the pipeline of diffusers in this folder", metavar="FOLDER")
    module: str | None = flag(
        None,
        "measure this torch module, or what this function makes, on random inputs of --shape",
        metavar="MODULE:NAME",
    )
    shape: tuple[int, ...] = flag((), "of one input of --module, such as 3 224 224")
    prompt: str = flag("a river in spring", "for a --pipeline that takes one")
    steps: int | None = flag(None, "of denoising (default: the --pipeline's own)")
    device: str | None = flag(None, "cpu, cuda or cuda:INDEX (default: cuda if there is one, else cpu)")
    dtype: str | None = flag(
        None,
        "number format of --pipeline and --module (default: float32 on a CPU, bfloat16 on a GPU; a module's own)",
        choices=DTYPES,
    )
    memory: int | None = flag(
        None, "memory of the device: what takes more does not fit (default: what it has)", size=True
    )
    threshold: int = flag(DEFAULT_THRESHOLD_BYTES, "a producer has more than this free at the knee", size=True)
    tolerance: float = flag(0.05, "throughput has saturated when twice the batch gains less than this part")
    max_batch: int = flag(1024, "no larger batch is tried")
    resolution: float = flag(0.1, "the knee is found up to this part of itself")
    warmup: int = flag(1, "runs of each batch that are not timed")
    repeats: int = flag(3, "runs of each batch at least, whose median counts")
    min_seconds: float = flag(0.2, "there are more until they took so long together")
    seed: int = flag(0, "seed of everything random")
    out: Path | None = flag(None, "write the profile to this JSON file")

    def __post_init__(self) -> None:
        given = [name for name in _WAYS if getattr(self, name) is not None]
        if len(given) != 1:
            ways = ", ".join(f"--{name}" for name in _WAYS)
            raise UserError(f"say what to measure by one of {ways}, not by {' and '.join(given) or 'none'}")
        if (self.module is None) != (not self.shape):
            raise UserError("--module needs --shape, the shape of one input, and nothing else does")
        if self.steps is not None and (self.pipeline is None or self.steps < 1):
            raise UserError(f"--steps is for --pipeline, and at least 1, not {self.steps}")
        if self.dtype is not None and self.target is not None:
            raise UserError("--dtype is for --pipeline and --module: a --target chooses its own")
        if any(length < 1 for length in self.shape):
            raise UserError(f"--shape must be of whole numbers of at least 1, not {self.shape}")


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    about = "Find the batch at which throughput saturates, and what memory is free there."
    add_verb(verbs, "media", about, MediaConfig)


def run(args: argparse.Namespace) -> int:
    """Measure, print and save the profile; 0."""
    config = dataclass_from(args, MediaConfig)
    if config.out is not None:
        check_writable(config.out)

    subject = str(config.target or config.module or config.pipeline)
    profile = in_own_process(lambda: measure(config), subject)
    save_and_show(profile, config.out, args.format)
    return 0


def measure(config: MediaConfig) -> Profile:
    """The profile that the flags ask for. Raises UserError if the subject cannot be opened, fails, or does not fit."""
    from floodplain.profiler.knee import KneeSettings
    from floodplain.profiler.media import MediaSettings, profile_media
    from floodplain.profiler.meters import open_meter

    knee = KneeSettings(tolerance=config.tolerance, max_batch=config.max_batch, resolution=config.resolution)
    settings = MediaSettings(knee=knee, warmup=config.warmup, repeats=config.repeats, min_seconds=config.min_seconds)
    device = _device(config)
    meter = open_meter(device, config.memory)
    findings = profile_media(_open(config, device, meter.usual_dtype), meter, settings)
    return _profile(config, meter, findings)


def _device(config: MediaConfig) -> torch.device:
    import torch

    try:
        return torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise UserError(f"--device must be cpu, cuda or cuda:INDEX, not {config.device}") from None


def _open(config: MediaConfig, device: torch.device, usual_dtype: torch.dtype) -> BatchRun:
    import torch

    from floodplain.profiler import media_targets

    torch.manual_seed(config.seed)
    dtype = None if config.dtype is None else media_targets.DTYPES[config.dtype]
    if config.target is not None:
        return media_targets.open_callable(config.target)
    if config.module is not None:
        return media_targets.open_module(config.module, config.shape, device, dtype)
    assert config.pipeline is not None
    return media_targets.open_pipeline(
        config.pipeline, device, dtype or usual_dtype, config.prompt, config.steps, config.seed
    )


def _profile(config: MediaConfig, meter: MemoryMeter, findings: MediaFindings) -> Profile:
    from floodplain.files.profile import Profile

    knee, best = findings.knee, findings.at_knee
    assert best.peak_bytes is not None and best.free_bytes is not None
    result = {
        "batch": knee.batch,
        "throughput": knee.throughput,
        "peak_bytes": best.peak_bytes,
        "free_bytes": best.free_bytes,
        "role": "producer" if best.free_bytes > config.threshold else "consumer",
        "threshold_bytes": config.threshold,
        "total_bytes": meter.total_bytes,
        "is_saturated": knee.is_saturated,
        **({} if knee.limit is None else {"limit_batch": knee.limit}),
    }
    spreads = [each.spread for each in findings.tries if each.spread is not None]
    return Profile(
        kind="media",
        subject=str(config.target or config.module or config.pipeline),
        machine=meter.machine,
        settings=asdict(config),
        result=result,
        tries=[asdict(each) for each in findings.tries],
        errors={"spread": best.spread, "worst_spread": max(spreads, default=None)},
    )


T = TypeVar("T")

_INTERRUPTED = 130


def in_own_process(work: Callable[[], T], what: str) -> T:
    """The result of ``work``, which can be pickled, in a forked child, which exits without waiting for its threads.

    Call it before torch is imported: the child has only the calling thread. UserError if ``work`` raised one, or ended
    its process (it begins with ``what``); KeyboardInterrupt if either process was interrupted.
    """
    with os.fdopen(os.memfd_create("result"), "w+b") as result:
        child = os.fork()
        if child == 0:
            _work(work, result.fileno())
        try:
            _, status = os.waitpid(child, 0)
        except BaseException:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        result.seek(0)
        said = result.read()
    code = os.waitstatus_to_exitcode(status)
    if code == _INTERRUPTED:
        raise KeyboardInterrupt
    if code or not said:
        raise UserError(f"{what} ended its process {_how(code)}")
    value, refusal = pickle.loads(said)  # written by our own code
    if refusal is not None:
        raise UserError(refusal)
    return value  # type: ignore[no-any-return]


def _work(work: Callable[[], object], fd: int) -> NoReturn:
    status = 1
    outcome: tuple[object, str | None]
    try:
        signal_at_parents_end(signal.SIGKILL)
        with os.fdopen(fd, "wb") as result:
            try:
                outcome = work(), None
            except UserError as error:
                outcome = None, str(error)
            pickle.dump(outcome, result)
        status = 0
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(status)


def _how(code: int) -> str:
    if code >= 0:
        return f"with exit status {code}: it must return instead"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    hint = ", perhaps for want of memory: give a smaller --max-batch" if -code == signal.SIGKILL else ""
    return f"by {name}{hint}"
