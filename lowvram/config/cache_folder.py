"""Where lowvram keeps, on this machine, what it would otherwise make anew (traces, calibrations, decoded images), and
what tells this user's runs from others'."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

CACHE_VARIABLE = "LOWVRAM_CACHE"  # an environment variable


def cache_folder() -> Path:
    """The folder of everything that lowvram caches on this machine."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return expanded(named)
    try:
        return Path.home() / ".cache" / "lowvram"
    except RuntimeError:  # no HOME, and no entry among the system's users, as in some containers
        return Path(tempfile.gettempdir()) / f"lowvram-{os.getuid()}"


def expanded(name: str) -> Path:
    """A path whose `~` no shell has expanded; itself if there is no such user."""
    with suppress(RuntimeError):
        return Path(name).expanduser()
    return Path(name)


def state_folder() -> Path | None:
    """The folder of what lowvram keeps for this user, which nobody else may read; None if the user has no home."""
    base = Path(os.environ.get("XDG_STATE_HOME") or "")
    try:
        return (base if base.is_absolute() else Path.home() / ".local" / "state") / "lowvram"
    except RuntimeError:  # no HOME, and no entry among the system's users
        return None
