"""Negative controls: faults of the product that a law must notice, each a name, an attribute and what replaces it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Fault = Callable[[pytest.MonkeyPatch], None]
Broken = Callable[..., Any]


def breaks(owner: object, attribute: str) -> Callable[[Broken], Fault]:
    """Make a fault of ``broken(original, *arguments)``, called in place of the function or property ``attribute``."""

    def decorate(broken: Broken) -> Fault:
        def fault(patch: pytest.MonkeyPatch) -> None:
            original = getattr(owner, attribute)
            if isinstance(original, property):
                patch.setattr(owner, attribute, property(lambda self: broken(original.fget, self)))
            else:
                patch.setattr(owner, attribute, lambda *args, **named: broken(original, *args, **named))

        fault.__name__ = broken.__name__
        return fault

    return decorate


class Controls(list[Any]):
    """The faults that one law must notice: parameters of its test, each a fault and the values beside it."""

    def __init__(self, *faults: Fault) -> None:
        for fault in faults:
            self.patches()(fault)

    def patches(self, *values: object) -> Callable[[Fault], Fault]:
        """Add a fault that patches by itself."""

        def decorate(fault: Fault) -> Fault:
            self.append(pytest.param(fault, *values, id=fault.__name__))
            return fault

        return decorate

    def breaks(self, owner: object, attribute: str, *values: object) -> Callable[[Broken], Fault]:
        """Add a fault of one attribute, as of ``breaks``."""
        return lambda broken: self.patches(*values)(breaks(owner, attribute)(broken))

    def add(self, name: str, owner: object, attribute: str, broken: Broken, *values: object) -> None:
        """Add a fault of one attribute that an expression replaces."""
        broken.__name__ = name
        self.breaks(owner, attribute, *values)(broken)
