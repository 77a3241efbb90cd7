"""Hooks of mkdocs (``mkdocs.yml``): the pages of the site, their order, and a reference made from the code.

The site has the repository's layout, so that a relative link means the same in a checkout and in the site. Beside the
pages it has every file that a page links to.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url
from prometheus_client.core import Metric

from floodplain.cli.main import list_parsers
from floodplain.cli.options import COMMON_FLAGS
from floodplain.coordinator.metrics import CoordinatorMetrics
from floodplain.coordinator.service import BookView, ServiceTotals
from floodplain.engine.outputs import EngineStats
from floodplain.server.counts import RequestCounts
from floodplain.server.metrics import ServingMetrics

ROOT = Path(__file__).parents[1]
FLAGS, METRICS = "docs/reference/flags.md", "docs/reference/metrics.md"
MERMAID = "mermaid.min.js"
"""Draws the diagrams of the pages that have some. ``tools/setup_docs.sh`` puts it into ``.venv-docs``."""

SECTIONS = {
    "Tutorials": ("docs/tutorials/*.md",),
    "How-to": ("docs/how-to/*.md",),
    "Reference": (FLAGS, METRICS, "docs/status.md", "docs/api.md", "docs/metrics.md", "docs/glossary.md"),
    "Design": ("docs/architecture.md", "docs/design/*.md"),
    "Benchmarks": ("benchmarks/README.md", "benchmarks/*/*.md", "docs/papers.md"),
    "Contributing": ("CONTRIBUTING.md", "tests/README.md", "tests/*/README.md", "examples/**/README.md"),
}
"""Patterns of the pages of each tab, in their order."""

_LINK = re.compile(r"(?<=\]\()([^)\s#]+)")


def on_config(config: Any) -> Any:
    """Set the navigation: the README, then the sections."""
    config.nav = [{"Home": "README.md"}, *({name: [*_find_pages(name)]} for name in SECTIONS)]
    return config


def on_files(files: Files, config: Any) -> Files:
    """The pages, the files that they link to, and the generated reference."""
    generated = {FLAGS: write_flags(), METRICS: write_metrics()}
    pages = {"README.md", *(page for name in SECTIONS for page in _find_pages(name))} - set(generated)
    paths = sorted(pages | {path for page in pages for path in _find_targets(ROOT / page)})
    made = [File.generated(config, path, content=text) for path, text in generated.items()]
    sources = {path: ROOT / path for path in paths} | {MERMAID: ROOT / ".venv-docs" / MERMAID}
    there = [File.generated(config, path, abs_src_path=str(source)) for path, source in sources.items()]
    theme = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*theme, *made, *there])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to a folder lead to its README, and draw diagrams."""
    folder = (ROOT / page.file.src_uri).parent

    def lead(match: re.Match[str]) -> str:
        return f"{match[1].rstrip('/')}/README.md" if (folder / match[1]).is_dir() else match[1]

    script = f'\n<script src="{get_relative_url(MERMAID, page.url)}"></script>\n' if "```mermaid" in markdown else ""
    return _LINK.sub(lead, markdown) + script


def write_flags() -> str:
    """A page with the flags of every verb, from its argument parser."""
    head = """# Flags

`floodplain VERB --help` prints the same. A flag such as `--max-num-seqs` is also the variable
`FLOODPLAIN_MAX_NUM_SEQS` and the key `max_num_seqs` of a `--config` file; the command line counts first, then the
variable, then the file. Every verb has these flags, too:

"""
    leaves = {words: parser for words, parser in sorted(list_parsers().items()) if parser._subparsers is None}
    common = _list_groups(next(iter(leaves.values())))[COMMON_FLAGS]
    return "\n".join([head + _write_flags(common) + "\n", *map(_write_verb, leaves, leaves.values())])


def write_metrics() -> str:
    """A page with the metrics of a server and of a coordinator, as they register them."""
    server = ServingMetrics("", EngineStats, RequestCounts())
    coordinator = CoordinatorMetrics(BookView((), (), {}, {}, 0.0), ServiceTotals())
    return f"""# Metrics of /metrics

[The metrics](../metrics.md) has their formulas, and those of many instances.

## A server

{_write_table(("name", "type", "labels", "meaning"), map(_write_metric, server.collect()))}

## A coordinator

{_write_table(("name", "type", "labels", "meaning"), map(_write_metric, coordinator.collect()))}
"""


def _find_pages(section: str) -> Iterator[str]:
    for pattern in SECTIONS[section]:
        found = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))
        yield from found or ([pattern] if pattern in (FLAGS, METRICS) else [])


def _find_targets(page: Path) -> Iterator[str]:
    """Files that are no pages, such as pictures and results."""
    for link in _LINK.findall(page.read_text()):
        target = (page.parent / link).resolve()
        if target.is_file() and target.suffix != ".md":
            yield target.relative_to(ROOT).as_posix()


def _list_groups(parser: argparse.ArgumentParser) -> dict[str, list[argparse.Action]]:
    """The flags of each group by its title, without ``--help``."""
    shown = {
        group.title or "": [one for one in group._group_actions if one.dest != "help"]
        for group in parser._action_groups
    }
    return {title: actions for title, actions in shown.items() if actions}


def _write_verb(words: str, parser: argparse.ArgumentParser) -> str:
    groups = {title: actions for title, actions in _list_groups(parser).items() if title != COMMON_FLAGS}
    tables = [f"**{title}**\n\n{_write_flags(actions)}\n" for title, actions in groups.items()]
    return "\n".join([f"## floodplain {words}\n", f"{parser.description}\n", *tables])


def _write_flags(actions: Iterable[argparse.Action]) -> str:
    return _write_table(("flag", "meaning"), map(_write_flag, actions))


def _write_flag(action: argparse.Action) -> tuple[str, str]:
    choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper()
    value = "" if action.nargs == 0 else str(action.metavar or choices)
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    text = (action.help or "").replace("%%", "%").replace("|", r"\|")
    return f"{names} `{value}`" if names and value else names or f"`{value}`", text


def _write_metric(metric: Metric) -> tuple[str, ...]:
    labels = getattr(metric, "_labelnames", ("model_name",))
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    return f"`{name}`", metric.type, ", ".join(f"`{label}`" for label in labels), metric.documentation


def _write_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
