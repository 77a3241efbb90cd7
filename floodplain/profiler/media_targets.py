"""Opens what ``profile media`` measures: a function of the batch, a torch module, or a pipeline of diffusers."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from floodplain.core.errors import UserError
from floodplain.files.extras import require
from floodplain.files.parsing import parsing, reason_of

BatchRun = Callable[[int], object]
DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip


def load_object(spec: str, flag: str) -> Any:
    """The object that ``MODULE:NAME``, the value of a flag, names; modules of the current folder are found, too.

    Raises UserError if there is no such module or name, or the import fails.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise UserError(f"{flag} {spec} must be MODULE:NAME, such as my_model:generate")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    with _users_code(f"{flag} {spec}", "cannot be imported"):
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    return found


@contextmanager
def _users_code(source: str, fault: str) -> Iterator[None]:
    """As ``parsing``, and turns the exit of a program during its import into a ``UserError``, too."""
    with parsing(source, fault):
        try:
            yield
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise UserError(f"{source}: {fault} ({reason_of(error)})") from error


def open_callable(spec: str) -> BatchRun:
    """A user's callable. Raises UserError if it is not callable, or cannot be imported."""
    run = load_object(spec, "--target")
    if not callable(run):
        raise UserError(f"--target {spec} is no function: it must compute a batch of the size that it is given")
    return run  # type: ignore[no-any-return]


def open_module(spec: str, shape: Sequence[int], device: torch.device, dtype: torch.dtype | None) -> BatchRun:
    """A function that runs a torch module, or one that a function makes, on random inputs.

    ``shape`` is that of one input, without the batch; the dtype None leaves the parameters as they are. Raises
    UserError if it is neither, or cannot be imported.
    """
    module = load_object(spec, "--module")
    if not isinstance(module, nn.Module) and callable(module):
        with _users_code(f"--module {spec}", "fails"):
            module = module()
    if not isinstance(module, nn.Module):
        raise UserError(f"--module {spec} is neither a torch module nor a function that makes one")
    module = module.eval().to(device=device, dtype=dtype)
    first = next(module.parameters(), None)
    inputs = dtype or (torch.float32 if first is None else first.dtype)

    def run(batch: int) -> object:
        with torch.inference_mode():
            return module(torch.randn(batch, *shape, device=device).to(inputs))

    return run


def open_pipeline(
    folder: Path, device: torch.device, dtype: torch.dtype, prompt: str, num_steps: int | None, seed: int
) -> BatchRun:
    """A function that runs a pipeline of diffusers: images, audio or video, with or without a prompt.

    The folder is as ``save_pretrained`` writes it; nothing is downloaded. Without a number of denoising steps the
    pipeline decides. Raises UserError if diffusers is not installed, or the pipeline takes no batch.
    """
    if not folder.is_dir():
        raise UserError(f"--pipeline {folder}: no such folder: write one with the pipeline's save_pretrained")
    pipeline = _load_pipeline(folder, dtype).to(device)
    pipeline.set_progress_bar_config(disable=True)
    known = inspect.signature(pipeline.__call__).parameters
    batched = _batch_arguments(known, prompt)
    if batched is None:
        raise UserError(
            f"--pipeline {folder}: {type(pipeline).__name__} takes neither prompt, class_labels nor batch_size: write "
            "a function of the batch, and name it by --target"
        )
    fixed = {} if num_steps is None or "num_inference_steps" not in known else {"num_inference_steps": num_steps}

    def run(batch: int) -> object:
        noise = {"generator": torch.Generator(device).manual_seed(seed)} if "generator" in known else {}
        return pipeline(**batched(batch), **fixed, **noise)

    return run


def _load_pipeline(folder: Path, dtype: torch.dtype) -> Any:
    require("--pipeline", "diffusers")
    from diffusers import DiffusionPipeline
    from diffusers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with parsing(f"--pipeline {folder}"):
        load: Any = DiffusionPipeline.from_pretrained
        return load(folder, dtype=dtype, local_files_only=True)


def _batch_arguments(known: Mapping[str, object], prompt: str) -> Callable[[int], dict[str, Any]] | None:
    """How to pass the batch to the pipeline: as prompts, as class labels, or by name; None if not at all."""
    if "prompt" in known:
        return lambda batch: {"prompt": [prompt] * batch}
    if "class_labels" in known:
        return lambda batch: {"class_labels": [0] * batch}
    if "batch_size" in known:
        return lambda batch: {"batch_size": batch}
    return None
