"""tests/plugin, installed as pip would do it, but into a folder of the test's."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.config_store import ConfigStore

from lowvram.config import plugins, registry

PACKAGE = "tidy_lion"
READ_ONCE = (plugins.plugins, plugins.own_groups, registry.options_of, registry.ready_options, registry.knob_of)
SOURCE = Path(__file__).parent / "plugin" / PACKAGE


def install(site: Path, package: str = PACKAGE, source: Path | None = SOURCE) -> Path:
    """A folder for Python's path that holds a package with its entry point; returns the package's folder.

    Args:
        source: what is installed; None: nothing but the entry point.
    """
    about = site / f"{package}-1.2.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (about / "entry_points.txt").write_text(f"[lowvram.knobs]\n{package} = {package}\n")
    if source is not None:
        shutil.copytree(source, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    return site / package


@contextmanager
def known_nowhere_afterwards() -> Iterator[None]:
    """Inside it, plug-ins may come onto Python's path; afterwards this process knows none of them."""
    stored = dict(ConfigStore.instance().repo)
    for read in READ_ONCE:
        read.cache_clear()
    yield
    ConfigStore.instance().repo = stored
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    for read in READ_ONCE:
        read.cache_clear()
