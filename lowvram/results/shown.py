"""Texts as people read them, in lines and in cells. Names and messages come from anywhere. Needs no torch."""

from __future__ import annotations

import re

from lowvram.config.secret import text_without_secrets

# What moves the cursor, ends a line, or turns the direction of writing.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_FORMULA = re.compile(r"[=+\-@\t\r]")


def shown(text: str) -> str:
    """Part of a line: without secrets, and what would leave the line is escaped."""
    return _CONTROL.sub(_escaped, text_without_secrets(text))


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def last_shown(line: str) -> str:
    """Of what was printed over and over in one line, such as a bar of progress, the last."""
    return shown(line.rstrip("\r").rpartition("\r")[2])


def cell(value: float | str | None) -> float | str | None:
    """Of a CSV file: a text that a spreadsheet would run as a formula begins with an apostrophe."""
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value
