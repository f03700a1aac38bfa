"""`metrics.jsonl` of a point: a line for every logged step, written at once. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO, final

from lowvram.durable import write_text
from lowvram.results.row import to_json

FILE_NAME = "metrics.jsonl"


@final
class Metrics:
    """The file, which is open from the moment when the point begins with its steps. A point may begin again."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._file: TextIO | None = None

    def begin(self, step: int) -> None:
        """The steps after `step` come; what was written of such ones is void."""
        self.close()
        cut_back(self._path, step)
        self._file = self._path.open("a")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One line."""
        assert self._file is not None
        self._file.write(to_json({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def cut_back(metrics: Path, step: int) -> None:
    """Keep the lines up to `step`; a torn last line goes too."""
    if not metrics.exists():
        return
    kept = []
    for line in metrics.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:
            break
    write_text(metrics, "".join(kept))
