"""What Markdown pages claim: relative links with their anchors, and commands of ``floodplain``."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_FENCE = re.compile(r"^( *)(```+)[^\n]*\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
_COMMAND = re.compile(r"^\s*(?:\$ )?(?:\w+=\S* )*(?:[\w./-]*/)?floodplain (.+)$")
_END_OF_COMMAND = {"|", "||", "&", "&&", ";", ">", ">>", "2>&1"}


def find_broken_links(page: Path) -> list[str]:
    """Relative links of a page that lead to no file, no folder with a README, or no heading."""
    return [link for link in _LINK.findall(_FENCE.sub("", page.read_text())) if _is_broken(page, link)]


def find_commands(text: str) -> Iterator[list[str]]:
    """The arguments of each command ``floodplain ...`` in a fenced or indented block."""
    blocks = [match[3] for match in _FENCE.finditer(text)]
    blocks += re.findall(r"(?:^    .*\n?)+", _FENCE.sub("", text), re.MULTILINE)
    for block in blocks:
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            if command := _COMMAND.match(line):
                yield _read_arguments(command[1])


def find_mentions(text: str) -> Iterator[list[str]]:
    """The arguments of each ``floodplain ...`` in a line of text, which may be a part of a command."""
    for mention in re.findall(r"`(?:[\w./-]*/)?floodplain ([^`]+)`", _FENCE.sub("", text)):
        yield mention.split()


def find_sources(text: str) -> Iterator[str]:
    """The scripts, modules and scenarios of this repository that a page names, as paths from its root."""
    yield from re.findall(r"(?<![\w./-])((?:benchmarks|examples|tests|tools)/[\w/.-]+\.(?:py|sh|yaml))\b", text)
    for module in re.findall(r"python -m ((?:benchmarks|tests)\.[\w.]*\w)", text):
        yield f"{module.replace('.', '/')}.py"


def find_targets(text: str) -> list[str]:
    """The targets of ``make`` that a page names in code."""
    code = [match[3] for match in _FENCE.finditer(text)] + re.findall(r"`[^`\n]+`|^    .*$", text, re.MULTILINE)
    return re.findall(r"^`? *make ([a-z][\w-]*)", "\n".join(code), re.MULTILINE)


def _is_broken(page: Path, link: str) -> bool:
    if "://" in link or link.startswith("mailto:"):
        return False
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    target = target / "README.md" if target.is_dir() else target
    return not target.exists() or bool(anchor and anchor not in _find_anchors(target.read_text()))


def _find_anchors(text: str) -> set[str]:
    """The anchors of the headings, as GitHub and the site name them."""
    anchors, seen = set(), Counter[str]()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        anchors.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return anchors


def _read_arguments(text: str) -> list[str]:
    words = shlex.split(text, comments=True)
    ends = [at for at, word in enumerate(words) if word in _END_OF_COMMAND]
    return words[: ends[0]] if ends else words
