"""`memory_over_step.csv`: the memory of one step by kind, from its first event to its last. Needs no torch.

A line is what was alive after an event (the allocation, resize or release of a tensor's storage): its number, the phase
of the step, and the bytes of each kind.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowvram.results.files.durable import write_text
from lowvram.results.files.regular import open_regular

FILE_NAME = "memory_over_step.csv"
EVENT, PHASE, SUFFIX = "event", "phase", "_bytes"
MOST_READ = 1000  # lines; lowvram writes about 200


@dataclass(frozen=True)
class Moments:
    """The lines of a file, column by column."""

    events: tuple[int, ...]
    phases: tuple[str, ...]
    by_kind: dict[str, tuple[int, ...]]  # bytes


def write(folder: Path, kinds: Sequence[str], moments: Sequence[Sequence[Any]]) -> None:
    """Writes the file in one move. A moment is its event, its phase, and the bytes of each kind."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([EVENT, PHASE, *(f"{kind}{SUFFIX}" for kind in kinds)])
    writer.writerows(moments)
    write_text(folder / FILE_NAME, text.getvalue())


def read(folder: Path) -> Moments | None:
    """The file in a point's folder; None if there is none, or if it isn't as lowvram writes it."""
    try:
        with io.TextIOWrapper(open_regular(folder / FILE_NAME), encoding="utf-8", newline="") as file:
            titles, *lines = [line for line, _ in zip(csv.reader(file), range(MOST_READ), strict=False)]
        columns = dict(zip(titles, zip(*lines, strict=True), strict=True))
        events, phases = tuple(map(int, columns.pop(EVENT))), columns.pop(PHASE)
        by_kind = {title.removesuffix(SUFFIX): tuple(map(int, sizes)) for title, sizes in columns.items()}
    except (OSError, ValueError, KeyError, csv.Error):
        return None
    return Moments(events, phases, by_kind)
