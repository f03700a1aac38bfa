"""The words of a command line, as Hydra reads them: KEY=VALUE."""

from __future__ import annotations

from hydra.core.override_parser.overrides_parser import OverridesParser


def key(word: str) -> str:
    """What an override sets: `+a.b=1` -> a.b"""
    return word.partition("=")[0].lstrip("+~")


def typed_value(words: list[str], wanted: str) -> str | None:
    """What was typed for a key, without Hydra's quotes; None for null, and if it was not.

    Raises:
        HydraException: the word can't be read.
    """
    typed = [word for word in words if key(word) == wanted]
    value = OverridesParser.create().parse_overrides(typed[-1:])[0].value() if typed else None
    return None if value is None else str(value)
