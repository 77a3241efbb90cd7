"""Commands that are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from floodplain.cli.main import main

Refuse = Callable[..., str]


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Run a command in this process that is refused with status 2; return what is told: one line on standard error."""

    def refuse(*words: str) -> str:
        capsys.readouterr()  # of what ran before
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert (out, err[:12], err.count("\n")) == ("", "floodplain: ", 1)
        return err.removeprefix("floodplain: ").removesuffix("\n")

    return refuse
