"""Completion scripts of shells, made by shtab from the parser of all verbs."""

from __future__ import annotations

import argparse

from floodplain.files.extras import missing


def make_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script that completes the words of ``parser`` and of its verbs in ``shell``.

    Raises UserError if shtab is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise missing("--print-completion", "shtab") from None
    _prepare(parser, {"FILE": shtab.FILE, "FOLDER": shtab.DIRECTORY, "MODEL": shtab.FILE})
    script: str = shtab.complete(parser, shell)
    return script


def _prepare(parser: argparse.ArgumentParser, kinds: dict[str, object]) -> None:
    """Have shtab complete paths, and verbs without a line of help, which it would leave out."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            listed = {choice.dest for choice in action._choices_actions}
            for name, verb in action.choices.items():
                if name not in listed:
                    action._choices_actions.append(action._ChoicesPseudoAction(name, (), verb.description or name))
                _prepare(verb, kinds)
        elif action.metavar in kinds:
            action.complete = kinds[action.metavar]  # type: ignore[attr-defined]
