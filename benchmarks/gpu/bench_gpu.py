"""What the engine reaches on a GPU, beside what the device allows. README.md says how to run and read it.

Rows are printed and saved as they come, so that a run that is cut short leaves what it had. A part that fails does not
stop the others: its error stands in the result, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.layer_rows import measure_layers
from benchmarks.gpu.memory_rows import COPY_BYTES, measure_pages, measure_resizing, measure_transfers
from benchmarks.gpu.model_rows import ModelBench, measure_ceilings
from benchmarks.gpu.plain_device import PlainDevice
from benchmarks.gpu.remap_rows import measure_remap
from benchmarks.gpu.tier_rows import find_places, measure_copy_sizes, measure_guests, measure_tiers
from benchmarks.gpu.timing import HEADER, Row
from floodplain.core.errors import UserError
from floodplain.memory.arena import Device
from floodplain.memory.cuda.device import CudaDevice, open_cuda_device
from floodplain.observe.strict_json import save_result

HERE = Path(__file__).resolve().parent


class Report:
    """The result file, rewritten after every row."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        device = re.sub(r"[^a-z0-9]+", "-", str(facts["device"]).lower()).strip("-")
        self._path = folder / f"result-{device}.json"
        self._result: dict[str, Any] = {**facts, "rows": {}, "errors": {}}

    @property
    def has_errors(self) -> bool:
        """Whether a part failed."""
        return bool(self._result["errors"])

    def run(self, part: str, rows: Iterator[Row]) -> list[Row]:
        """Print and save the rows of one part, and return them."""
        print(f"\n{part}\n{HEADER}", flush=True)
        done: list[Row] = []
        try:
            for row in rows:
                print(row, flush=True)
                done.append(row)
                self._result["rows"][part] = [asdict(one) for one in done]
                self._save()
        except Exception:  # the other parts of a machine that was lent for minutes still count
            self.note_error(part, traceback.format_exc())
        return done

    def note_error(self, part: str, error: str) -> None:
        """Say that a part has no result, and why."""
        print(f"{part}: {error}", flush=True)
        self._result["errors"][part] = error
        self._save()

    def _save(self) -> None:
        save_result(self._path, self._result)


def collect_facts(model: str, seed: int) -> dict[str, Any]:
    """Machine, versions, command, seed."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "device_bytes": properties.total_memory,
        "num_multiprocessors": properties.multi_processor_count,
        "driver": _read_driver_version(),
        "versions": {name: _find_version(name) for name in ("torch", "triton", "cuda-bindings", "numpy")},
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "num_cpus": os.cpu_count(),
        "command": " ".join(["python -m benchmarks.gpu.bench_gpu", *sys.argv[1:]]),
        "model": model,
        "seed": seed,
    }


def _find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read_driver_version() -> str | None:
    command = ["nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def open_memory(report: Report) -> Device:
    """The device's own virtual memory, or torch's where cuda-bindings is missing: then the result says so."""
    try:
        return open_cuda_device(0)
    except UserError as error:
        report.note_error("virtual memory", f"{error}; everything else runs on torch's own memory")
        return PlainDevice()


def measure_all(report: Report, model: str, seed: int) -> None:
    """All parts, in the order in which the later need the earlier."""
    memory = open_memory(report)
    ceilings = report.run("ceilings", measure_ceilings())
    bench = ModelBench(model, memory, 2 * COPY_BYTES, seed)
    report.run("decode", bench.measure_decode(ceilings[0].median * 1e9))
    report.run("prefill", bench.measure_prefill(ceilings[1].median * 1e12))
    report.run("transfers", measure_transfers(bench.pool, seed))
    with find_places(memory) as places:
        report.run("tiers", measure_tiers(bench.pool, places, seed))
        report.run("copy sizes", measure_copy_sizes(memory, places, seed))
    if isinstance(memory, CudaDevice):
        report.run("layers", measure_layers(seed))
        report.run("guests", measure_guests())
        with open_cuda_device(0) as device:
            report.run("pages", measure_pages(device))
            report.run("resizing", measure_resizing(device, bench.layout, seed))
            report.run("remap", measure_remap(device, bench.layout))
    bench.close()


def main() -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="dummy:llama-3.1-8b")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the result")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device, or torch is a build without CUDA", file=sys.stderr)
        return 2
    report = Report(args.out, collect_facts(args.model, args.seed))
    measure_all(report, args.model, args.seed)
    return int(report.has_errors)


if __name__ == "__main__":
    sys.exit(main())
