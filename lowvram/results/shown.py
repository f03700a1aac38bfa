"""Makes text from anywhere safe to print: no secrets, control characters or spreadsheet formulas. Needs no torch."""

from __future__ import annotations

import re

from lowvram.config.secret import text_without_secrets

# Characters that move the cursor, end a line, change the direction of writing, can't be seen, or can't be written.
_CONTROL = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_FORMULA = re.compile(r"[=+\-@\t\r]")


def shown(text: str) -> str:
    """The text without secrets, its control characters and new lines escaped."""
    return _CONTROL.sub(_escaped, text_without_secrets(text))


def one_line(text: str) -> str:
    """The same in one line: every white space is a blank."""
    return shown(" ".join(text.split()))


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def last_shown(line: str) -> str:
    """The last state of a line that was overwritten with carriage returns, such as a progress bar."""
    return shown(line.rstrip("\r").rpartition("\r")[2])


def cell(value: float | str | None) -> float | str | None:
    """The value for a CSV file: an apostrophe precedes text that a spreadsheet would run as a formula."""
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value
