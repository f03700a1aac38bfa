"""The lines of a `metrics.jsonl`, each with a checksum of itself, and their one reader. Imports no torch.

A line is JSON. Its last field is the CRC-32 of the bytes in front of it, as eight hex digits:

    {"step": 1, "loss/train": 5.1, "crc32": "2f1c7a90"}

Early versions wrote none: such lines count as long as no line with one is in front of them.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowvram.results.row import to_json

FILE_NAME = "metrics.jsonl"
WITH_CHECKSUM = re.compile(rb'(\{.*), "crc32": "([0-9a-f]{8})"\}', re.DOTALL)
Values = dict[str, Any]


@dataclass(frozen=True)
class Lines:
    """What a file holds."""

    rows: list[Values]  # `step` and the values, without the checksum
    num_damaged: int  # lines that can't be read
    is_foreign: bool = False  # they were another run's

    @property
    def wrong(self) -> str | None:
        """What was done about them."""
        if self.is_foreign:
            return "its lines are another run's: all are left out"
        return f"{self.num_damaged} damaged lines are left out" if self.num_damaged else None


def to_line(row: Mapping[str, Any]) -> str:
    """A row as the file has it, with the end of the line."""
    text = to_json(row).removesuffix("}")
    return f'{text}, "crc32": "{zlib.crc32(text.encode()):08x}"}}\n'


def read_lines(path: Path, most: int | None = None) -> Lines:
    """All rows that can be read. What was written half, without the end of its line, is none and no damage.

    Args:
        most: of a longer file only every so many-th line is looked at, and the last one.

    Raises:
        OSError: the file is there, and can't be read.
    """
    try:
        *lines, half = path.read_bytes().split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return Lines([], 0)
    lines = [line for line in lines if line.strip()]
    if parsed(list(bodies([half]))):  # it is whole: an editor has left out the last end of a line
        lines.append(half)
    stride = 1 if most is None else -(-len(lines) // most) or 1
    looked_at = lines[(len(lines) - 1) % stride :: stride]
    rows = parsed(list(bodies(looked_at)))
    return Lines(rows, len(looked_at) - len(rows))


def bodies(lines: Sequence[bytes]) -> Iterator[bytes]:
    """The JSON of those whose checksums are right, and of older ones."""
    has_checksums = False
    for line in lines:
        if match := WITH_CHECKSUM.fullmatch(line):
            has_checksums = True
            if zlib.crc32(match[1]) == int(match[2], 16):
                yield match[1] + b"}"
        elif not has_checksums:
            yield line


def parsed(texts: Sequence[bytes]) -> list[Values]:
    """The rows among some texts. All at once is ten times as fast as one by one, which is what finds the bad ones."""
    try:
        found = json.loads(b"[" + b",".join(texts) + b"]", parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        found = []
        for text in texts:
            try:
                found.append(json.loads(text, parse_constant=lambda _: None))
            except (ValueError, RecursionError):
                continue
    return [row for row in found if is_row(row)]


def is_row(row: Any) -> bool:
    """A step, and numbers."""
    is_numeric = isinstance(row, dict) and all(
        value is None or isinstance(value, int | float) for value in row.values()
    )
    return is_numeric and isinstance(row.get("step"), int)
