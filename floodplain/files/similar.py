"""The known word that a mistyped one stands for."""

from __future__ import annotations

from collections.abc import Iterable

SIMILARITY, TYPO_SIMILARITY = 0.5, 0.8
"""Least similarity of a likely word; and where another hint follows, of a likely slip."""


def nearest(word: str, known: Iterable[str], similarity: float = SIMILARITY) -> str | None:
    """The known word that a mistyped one stands for: with the same letters, else the most similar; None: none is."""
    import difflib  # which few commands need

    names = list(known)
    same = [name for name in names if sorted(name) == sorted(word)]
    return next(iter(same or difflib.get_close_matches(word, names, 1, similarity)), None)


def did_you_mean(word: str, known: Iterable[str], similarity: float = SIMILARITY) -> str:
    """The same as the end of a message; empty if no known word is similar."""
    near = nearest(word, known, similarity)
    return f" (did you mean {near}?)" if near else ""
