"""The pages of the repository: every relative link leads somewhere, and every command is one that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.command_lines import find_complaint, find_unknown
from tests.support.markdown import find_broken_links, find_commands, find_mentions, find_sources, find_targets

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *(
            path
            for folder in ("docs", "benchmarks", "examples", "tests", "deploy")
            for path in (ROOT / folder).rglob("*.md")
        ),
    }
)


def test_every_link_of_a_page_leads_somewhere() -> None:
    assert len(PAGES) > 60
    assert not {str(page.relative_to(ROOT)): broken for page in PAGES if (broken := find_broken_links(page))}


def test_every_shown_command_parses() -> None:
    shown = [(page.name, command) for page in PAGES for command in find_commands(page.read_text())]
    assert len(shown) > 30
    assert not [(name, command, wrong) for name, command in shown if (wrong := find_complaint(command))]


def test_every_mentioned_verb_and_flag_is_one() -> None:
    mentioned = [(page.name, words) for page in PAGES for words in find_mentions(page.read_text())]
    assert len(mentioned) > 30
    assert not [(name, words, wrong) for name, words in mentioned if (wrong := find_unknown(words))]


def test_every_named_script_is_there() -> None:
    named = [(page.name, source) for page in PAGES for source in find_sources(page.read_text())]
    assert len(named) > 80
    assert not [(name, source) for name, source in named if not (ROOT / source).is_file()]


def test_every_named_target_of_make_is_one() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [(page.name, target) for page in PAGES for target in find_targets(page.read_text())]
    assert len(named) > 15
    assert not [(name, target) for name, target in named if target not in targets]


@pytest.mark.parametrize(
    "link", ["gone.md", "there.md#gone", "#gone", "empty/", "there.md#it-is-here-1", "../there.md"]
)
def test_a_link_that_leads_nowhere_is_found(tmp_path: Path, link: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "there.md").write_text("## It is `here`!\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n[good](there.md#it-is-here), [bad]({link})\n```\n[code](gone)\n```\n")
    assert find_broken_links(page) == [link]


@pytest.mark.parametrize(
    "command",
    ["serv smollm2", "serve smollm2 --prot 8000", "serve", "bench serve --base-url", "serve smollm2 --port many"],
)
def test_a_command_that_does_not_parse_is_found(command: str) -> None:
    (found,) = find_commands(f"```\n.venv/bin/floodplain {command}   # a comment\n```\n")
    assert found == command.split()
    assert find_complaint(found)


@pytest.mark.parametrize("words", ["serv", "serve --prot 8000", "bench offline --config-file FILE"])
def test_a_mention_of_no_verb_or_flag_is_found(words: str) -> None:
    (found,) = find_mentions(f"Call `floodplain {words}` first.")
    assert find_unknown(found)


def test_names_of_scripts_and_targets_are_read() -> None:
    text = (
        "`make gone`, make nothing\n\n    python -m tests.gone.run\n\n```\nmake also-gone  # why\ntools/gone.sh\n```\n"
    )
    assert [*find_sources(text)] == ["tools/gone.sh", "tests/gone/run.py"]
    assert sorted(find_targets(text)) == ["also-gone", "gone"]
