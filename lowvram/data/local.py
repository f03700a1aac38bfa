"""Reads the user's files through the library `datasets`, without a network."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowvram.config.errors import BadInput, require

HOP = "::"  # in fsspec's addresses, a.csv::b.zip is a file in an archive


def existing_path(text: str) -> Path:
    """`data.path` with `~` expanded. Raises BadInput when nothing is there."""
    require(bool(text), "data.path", text, "a file or folder")
    try:
        path = Path(text).expanduser()
        path.stat()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: ~NAME of an unknown user
        raise BadInput("data.path", text, f"an existing file or folder that can be read ({error})") from None
    return path


def visible_entries(text: str, folder: Path) -> list[Path]:
    """The entries directly in the folder, sorted, without hidden ones. Raises BadInput when it can't be listed."""
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise BadInput("data.path", text, f"readable: {folder} can't be listed ({error.strerror})") from None


def is_hidden(path: Path, root: Path) -> bool:
    """Whether a part of the path below the root starts with a dot."""
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def check_no_hop(key: str, text: str, path: Path) -> None:
    """Raises BadInput for a path with `::` in it. `datasets` cuts such a path there, and takes each part for a place of
    its own: it then finds no file, or silently fewer files."""
    require(HOP not in str(path.absolute()), key, text, f"without {HOP!r} in names of files and folders: rename {path}")


def looks_local(name: str) -> bool:
    """Whether a name of a data set, model or tokenizer can only be a path: the hub has no such names."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def load_local(builder: str, patterns: Mapping[str, Sequence[str]], **options: Any) -> Any:
    """A `datasets.DatasetDict` with one split per entry, memory-mapped from datasets' own cache.

    `patterns` are glob patterns: pass a plain path through `glob.escape`.
    """
    from datasets import load_dataset  # importing it takes a second

    with quiet_progress():
        return load_dataset(builder, data_files=patterns, **options)


def escaped(paths: Sequence[Path]) -> list[str]:
    """The paths as patterns that match only themselves."""
    return [glob.escape(str(path.absolute())) for path in paths]


@contextmanager
def quiet_progress() -> Iterator[None]:
    """Hides the progress bars of `datasets`, which would mix with our own lines."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    was_quiet = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not was_quiet:
            enable_progress_bars()
