"""Where lowvram keeps on this machine what it would otherwise make anew: traces, calibrations, decoded images."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "LOWVRAM_CACHE"  # an environment variable


def cache_folder() -> Path:
    """The folder of everything that lowvram caches on this machine."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "lowvram")
