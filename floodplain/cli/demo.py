"""``floodplain demo``: serve one burst in three ways with a small real model, and show who waits for what.

The pool of KV memory holds about 24 requests (``--quick``: 12 shorter ones). The load is set by what this machine turns
out to do: a stable rate below its capacity, several times that for the burst. Capacity is measured once, and every way
gets the same requests. Everything runs in this process, from the load client to the model.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from floodplain.cli.demo_load import FULL, QUICK, Scale, burst, engine_config, sample_spec
from floodplain.cli.demo_run import Run, measure_capacity, serve_way
from floodplain.cli.demo_ways import TITLE, WAYS, paragraphs
from floodplain.cli.files import check_writable
from floodplain.cli.options import add_dataclass_flags, add_verb, dataclass_from

STABLE_SHARE = 0.5
"""The stable rate as a share of the measured capacity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """The flags of the demo."""

    out: Path = field(default=Path("demo"), metadata={"help": "folder for demo.json, pictures and index.html"})
    quick: bool = field(default=False, metadata={"help": "a shorter burst: about a minute in all"})
    model: str = field(default="smollm2", metadata={"help": "the model that is served"})
    seed: int = field(default=0, metadata={"help": "seed of arrivals, lengths and texts"})


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    add_dataclass_flags(add_verb(verbs, "demo", "Serve a burst in three ways and show who waits for what."), DemoConfig)


def run(args: argparse.Namespace) -> int:
    """Run the demo, write its files, print its table."""
    demo = dataclass_from(args, DemoConfig)
    check_writable(demo.out / "demo.json")
    runs = asyncio.run(_run_demo(demo, progress=not args.quiet))
    _write(demo, runs)

    from floodplain.observe.strict_json import to_json
    from floodplain.observe.table import format_table, summary_rows, transposed

    if args.format == "json":
        print(to_json(_summary(runs)))
    else:
        print(format_table(*transposed(*summary_rows(runs))))
        print(f"\npictures and numbers: {demo.out / 'index.html'}")
    return 1 if any(result["failed"] for _, result in runs) else 0


async def _run_demo(demo: DemoConfig, *, progress: bool) -> list[Run]:
    scale = _scale(demo)
    sample = sample_spec(demo.seed, scale)
    base = engine_config(demo.model, sample, scale)
    capacity = await measure_capacity(base, replace(sample, num_prompts=scale.num_resident))
    spec = burst(sample, STABLE_SHARE * capacity, scale)
    return [await serve_way(way, base, spec, capacity, progress=progress) for way in WAYS]


def _scale(demo: DemoConfig) -> Scale:
    return QUICK if demo.quick else FULL


def _summary(runs: list[Run]) -> dict[str, Any]:
    return {"runs": [{"name": name, **result} for name, result in runs], "machine": _machine()}


def _machine() -> dict[str, Any]:
    import torch

    from floodplain.engine.offline import hardware_report

    return {
        "processor": hardware_report("cpu").name,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _write(demo: DemoConfig, runs: list[Run]) -> None:
    from floodplain.observe.plots import save_plots
    from floodplain.observe.report import render_report
    from floodplain.observe.strict_json import save_result

    scale = _scale(demo)
    save_result(demo.out / "demo.json", _summary(runs))
    save_plots(runs, demo.out)
    words = paragraphs(scale.num_resident, scale.burst_s, scale.burst_factor)
    page = render_report(TITLE, runs, _machine(), words, {way.name: way.words for way in WAYS})
    (demo.out / "index.html").write_text(page, encoding="utf-8")
