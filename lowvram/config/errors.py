"""Errors for mistakes of the user, each with one sentence that says how to mend it. Imports no torch."""

from __future__ import annotations

import math
from typing import Any

from lowvram.config.secret import text_without_secrets, without_secrets

CONSTANTS = {"None": "null", "True": "true", "False": "false"}


class BadInput(ValueError):
    """A value that the user can mend. Its text is one sentence: the key, the value, what is allowed."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        self.key, self.value, self.allowed = key, value, allowed
        shown = repr(without_secrets(value, key))
        text = text_without_secrets(f"{printable(key)}={CONSTANTS.get(shown, shown)}: must be {allowed}")
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        """So that it can be sent from one process to another: by default `__init__` would be given the text alone."""
        return ValueError.__new__, (type(self), *self.args), vars(self)


def printable(key: str) -> str:
    """A key, which may come from a stranger's file, without what would steer a terminal."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in key)


class Incompatible(ValueError):
    """Valid choices that conflict with each other or with this machine."""


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise `BadInput` unless `condition` holds. A nan is never allowed."""
    if not condition or (isinstance(value, float) and math.isnan(value)):
        raise BadInput(key, value, allowed)


class Refused(Exception):
    """A mistake whose text is already the sentence to be shown."""


class BadSample(RuntimeError):
    """A sample can't be used, as was found when it was read. The message is one sentence that says which and why."""


class Shortage(RuntimeError):
    """The machine lacks what a run needs. The message is one sentence that says what, and what to do."""
