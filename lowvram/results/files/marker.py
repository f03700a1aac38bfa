"""Reads `.lowvram`, the file that marks a folder as holding our results. run_folder.py writes and locks it.
Imports no torch, and nothing that takes time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lowvram.results.files.regular import SHORT_BYTES, read_regular

MARKER = ".lowvram"


def read_marker(text: bytes) -> dict[str, Any]:
    """The fields of a marker; empty if it can't be parsed."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def point_of(folder: Path) -> str | None:
    """The id of the point that the marker of its folder names; None if it names none."""
    try:
        return read_marker(read_regular(folder / MARKER, SHORT_BYTES)).get("point")
    except OSError:
        return None
