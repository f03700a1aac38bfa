"""`.lowvram`, the file that marks a folder whose results are ours: what it says. run_folder.py writes and locks it.
Imports no torch, and nothing that takes time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MARKER = ".lowvram"


def read_marker(text: bytes) -> dict[str, Any]:
    """What a marker says; nothing if it can't be read."""
    try:
        told = json.loads(text)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def point_of(folder: Path) -> str | None:
    """The point of a sweep that the marker of its folder names."""
    try:
        return read_marker((folder / MARKER).read_bytes()).get("point")
    except OSError:
        return None
