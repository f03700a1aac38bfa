"""A file of JSON lines that a script adds to as it measures, and continues from when it is started again."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowvram.config.identity import git_state

Line = dict[str, Any]


@dataclass(frozen=True)
class Book:
    """A line for each key; a torn last line counts as not written."""

    path: Path

    def read(self) -> dict[str, Line]:
        """By key; the last line of each."""
        found: dict[str, Line] = {}
        for text in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                line = json.loads(text)
                found[line["key"]] = line
            except (ValueError, KeyError, TypeError):
                continue
        return found

    def forget(self, keys: Collection[str]) -> None:
        """Remove what is written of these keys."""
        kept = [line for key, line in self.read().items() if key not in keys]
        if self.path.exists():
            self.path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def add(self, line: Line) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_torn = self.path.exists() and not f"\n{self.path.read_text()}".endswith("\n")
        with self.path.open("a") as file:
            file.write(("\n" if is_torn else "") + json.dumps(line) + "\n")


def stamp() -> Line:
    """When a line was made, and by which state of the program."""
    sha, is_dirty = git_state()
    return {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "git_sha": sha, "dirty": is_dirty}
