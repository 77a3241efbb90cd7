"""Completion scripts: bash completes verbs, flags and values by the script that is printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from floodplain.cli.main import SHELLS, VERBS, main
from tests.support.refusals import Refuse


def print_script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main(["--print-completion", shell])
    assert not end.value.code
    return capsys.readouterr().out


def complete(script: Path, *words: str) -> set[str]:
    """The words that bash offers for the last of ``words``."""
    typed = " ".join(f"'{word}'" for word in ("floodplain", *words))
    program = (
        f'source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; COMP_LINE="${{COMP_WORDS[*]}}"; '
        "COMP_POINT=${#COMP_LINE}; $(complete -p floodplain | sed 's/.*-F \\([^ ]*\\) .*/\\1/'); "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_bash_completes_verbs_flags_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    script = tmp_path / "floodplain.bash"
    script.write_text(print_script("bash", capsys))
    assert complete(script, "") >= set(VERBS)
    assert complete(script, "bench", "") >= {"offline", "serve"}
    assert complete(script, "serve", "--kv-") == {"--kv-memory", "--kv-expansion"}
    assert complete(script, "serve", "--policy", "") == {"fcfs", "cfs", "fair", "paced", "timely"}
    assert complete(script, "bench", "offline", "--kv-mem") == {"--kv-memory"}
    (tmp_path / "values.yaml").touch()
    assert complete(script, "serve", "--config", str(tmp_path / "val")) == {str(tmp_path / "values.yaml")}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_a_script_with_every_verb(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    script = print_script(shell, capsys)
    assert all(verb in script for verb in VERBS)
    assert "\\u00" not in script  # nothing of it was escaped as unsafe


def test_without_shtab_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, refuse: Refuse) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    told = refuse("--print-completion", "bash")
    assert told.startswith("--print-completion needs shtab, which is not installed: pip install")


def test_an_unknown_shell_is_refused_by_name(refuse: Refuse) -> None:
    assert refuse("--print-completion", "fish").startswith("argument --print-completion: invalid choice: 'fish'")
