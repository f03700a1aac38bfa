"""Writes and reads the lines of `metrics.jsonl`, each with its own checksum. Imports no torch.

A line is JSON. Its last field is the CRC-32 of the bytes in front of it, as eight hex digits:

    {"step": 1, "loss/train": 5.1, "crc32": "2f1c7a90"}

Early versions wrote no checksum: such a line counts if no line with a checksum precedes it.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowvram.results.files.durable import naming
from lowvram.results.files.regular import read_regular
from lowvram.results.row import to_json

FILE_NAME = "metrics.jsonl"
LARGEST_BYTES = 2**31  # of a file: lines of some ten million steps
WITH_CHECKSUM = re.compile(rb'(\{.*), "crc32": "([0-9a-f]{8})"\}', re.DOTALL)
Values = dict[str, Any]


@dataclass(frozen=True)
class Lines:
    """The content of a file."""

    rows: list[Values]  # `step` and the values, without the checksum
    num_damaged: int  # lines that can't be read
    is_foreign: bool = False  # whether the lines were another run's
    num_missing: int = 0  # lines that a snapshot knows and that can't be found

    @property
    def wrong(self) -> str | None:
        """What is wrong with the lines, and what was done; None if they are all right."""
        if self.is_foreign:
            return "its lines are another run's: all are left out"
        return f"{self.num_damaged} damaged lines are left out" if self.num_damaged else None


def mark_of(row: Mapping[str, Any]) -> list[int]:
    """What a snapshot knows of a line of the file: its step, a CRC-32 of its names, and one of the whole line."""
    return [row["step"], zlib.crc32(" ".join(sorted(row)).encode()), zlib.crc32(to_line(row).encode())]


def missing_of(marks: Iterable[Sequence[int]], rows: Iterable[Values], step: int) -> list[int]:
    """The steps of the lines that marks tell of and that aren't among the rows. A line of the last step, `step`, may
    have other values: a process that goes on there may have written it again."""
    there = Counter(tuple(mark if mark[0] < step else mark[:2]) for mark in map(mark_of, rows))
    known = Counter(tuple(mark if mark[0] < step else mark[:2]) for mark in marks)
    return sorted(mark[0] for mark in (known - there).elements())


def to_line(row: Mapping[str, Any]) -> str:
    """A row as a line of the file, with its checksum and the new line."""
    text = to_json(row).removesuffix("}")
    return f'{text}, "crc32": "{zlib.crc32(text.encode()):08x}"}}\n'


def read_lines(path: Path, most: int | None = None) -> Lines:
    """All rows that can be read. A last line that was half written is left out and doesn't count as damaged.

    Args:
        most: the most lines to read: of a longer file evenly spaced ones, the last among them.

    Raises:
        OSError: the file exists but can't be read.
    """
    try:
        return lines_of(read_regular(path, LARGEST_BYTES), most)
    except (FileNotFoundError, NotADirectoryError):
        return Lines([], 0)


def lines_of(data: bytes, most: int | None = None) -> Lines:
    """As `read_lines`, of what is in the file."""
    *lines, half = data.split(b"\n")
    lines = [line for line in lines if line.strip()]
    if parsed(list(bodies([half]))):  # whole: an editor removed the last new line
        lines.append(half)
    stride = 1 if most is None else -(-len(lines) // most) or 1
    sampled = lines[(len(lines) - 1) % stride :: stride]
    rows = parsed(list(bodies(sampled)))
    return Lines(rows, len(sampled) - len(rows))


def bodies(lines: Sequence[bytes]) -> Iterator[bytes]:
    """The JSON of the lines whose checksums match, and of lines of early versions."""
    has_checksums = False
    for line in lines:
        if match := WITH_CHECKSUM.fullmatch(line):
            has_checksums = True
            if zlib.crc32(match[1]) == int(match[2], 16):
                yield match[1] + b"}"
        elif not has_checksums:
            yield line


def parsed(texts: Sequence[bytes]) -> list[Values]:
    """The texts that are rows. Parsing all at once is ten times as fast; only if that fails, each is parsed alone."""
    try:
        values = json.loads(b"[" + b",".join(texts) + b"]", parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        values = []
        for text in texts:
            try:
                values.append(json.loads(text, parse_constant=lambda _: None))
            except (ValueError, RecursionError):
                continue
    return [row for row in values if is_row(row)]


def is_row(row: Any) -> bool:
    """Whether a value is a mapping with a step, an integer, and numbers."""
    is_numeric = isinstance(row, dict) and all(
        value is None or isinstance(value, int | float) for value in row.values()
    )
    return is_numeric and isinstance(row.get("step"), int)


def sync(folder: Path) -> None:
    """Bring to the disk what another process, which may have died, wrote to the file; nothing if there is none."""
    try:
        file = os.open(folder / FILE_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    try:
        with naming(folder / FILE_NAME):
            os.fsync(file)
    finally:
        os.close(file)
