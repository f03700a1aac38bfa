"""Finds what lowvram must not write to in a folder of a run: links, which lead to files of somebody else, and pipes and
devices. Imports no torch.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path


def strange_in(folder: Path, patterns: Sequence[str]) -> Path | None:
    """A path in the folder with one of the names that is neither a file nor a folder; None if there is none. A link is
    neither, wherever it leads."""
    ours = (path for path in sorted(folder.iterdir()) if any(fnmatchcase(path.name, pattern) for pattern in patterns))
    return next((path for path in ours if not is_plain(path)), None)


def is_plain(path: Path) -> bool:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:  # another program was faster
        return True
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)
