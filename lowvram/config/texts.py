"""Limits the length of texts that one process sends to another. Imports no torch."""

from __future__ import annotations

from typing import Any

LONGEST_REASON = 2**12  # characters of the reason in a row
LONGEST_LINE = 2**16  # of a printed line
LONGEST_TEXT = 2**18  # of any other text, such as a traceback


def shortened(text: str, longest: int) -> str:
    """The text; if it is too long, its beginning and how much was cut."""
    return text if len(text) <= longest else cut(text[:longest], len(text) - longest)


def cut(beginning: str, num_more: int) -> str:
    return f"{beginning}… ({num_more:,} characters more)"


def with_short_texts(value: Any) -> Any:
    """A copy in which no text is longer than an event may hold."""
    if isinstance(value, str):
        return shortened(value, LONGEST_TEXT)
    if isinstance(value, dict):
        return {key: with_short_texts(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_short_texts(item) for item in value]
    return value


def message(error: BaseException) -> str:
    """The text of an error, even if its `__str__` raises."""
    try:
        return str(error)
    except Exception as another:
        text = next((arg for arg in error.args if isinstance(arg, str)), None)
        return text or f"its message can't be had, as that raises {type(another).__name__}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text; of one without any the name of its class."""
    return (message(error).strip().splitlines() or [type(error).__name__])[0]


def brief(words: str) -> str:
    """The line of an error's text that says what happened: TorchScript's come after a traceback."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return lines[-1 if "Traceback" in words else 0].rstrip(".") if lines else ""
