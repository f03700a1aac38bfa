"""The words of a command line, as Hydra reads them: KEY=VALUE."""

from __future__ import annotations


def key(word: str) -> str:
    """What an override sets: `+a.b=1` -> a.b"""
    return word.partition("=")[0].lstrip("+~")
