"""`files.json` in an exported folder: the files that lowvram wrote there, with their hashes. Imports no torch.

An export replaces an earlier one file by file, because the user may have put files into the folder too. Meanwhile the
list names both the new files and those from `before`, so that the next export still knows our files if this one is cut
off; at the end it names only the new ones. A folder that doesn't match its list is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from lowvram.config.errors import BadInput
from lowvram.results.files.durable import flush, flush_folder, write_text
from lowvram.results.files.regular import LONG_BYTES, open_regular, read_regular

NAME = "files.json"


@final
@dataclass(frozen=True)
class Content:
    """Hash and size of a file's content."""

    sha256: str
    bytes: int

    def is_in(self, path: Path) -> bool:
        """Whether the path is a regular file, not a link, with this content."""
        with suppress(FileNotFoundError):
            status = path.lstat()
            return stat.S_ISREG(status.st_mode) and status.st_size == self.bytes and content_of(path) == self
        return False


Files = Mapping[str, Content]  # by their names


@final
@dataclass(frozen=True)
class Manifest:
    """The files of an export, and those of the export before; None: the export is complete."""

    files: Files
    before: Files | None = None


def content_of(path: Path) -> Content:
    with open_regular(path) as file:
        return Content(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)


def read(folder: Path) -> Manifest | None:
    """The list of a folder; None where there is none. Raises ValueError if it is damaged or somebody else's."""
    try:
        fields = json.loads(read_regular(folder / NAME, LONG_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(error.strerror) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    try:
        return Manifest(files_of(fields["files"]), fields["before"] and files_of(fields["before"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no list of files: {error}") from None


def files_of(entries: Mapping[str, Mapping[str, Any]]) -> Files:
    if any(name != Path(name).name for name in entries):
        raise ValueError("a name in it leads out of the folder")
    return {name: Content(**about) for name, about in entries.items()}


def write(folder: Path, manifest: Manifest) -> None:
    write_text(folder / NAME, json.dumps(asdict(manifest), indent=2) + "\n")


def check(folder: Path) -> None:
    """Check that an exported folder is as it was written. Early versions of lowvram wrote no list: that is a warning.

    Raises:
        BadInput: a file was changed or is missing, or an export was cut off.
    """
    try:
        manifest = read(folder)
    except ValueError as error:
        raise damaged(folder, NAME, str(error)) from None
    if manifest is None:
        warnings.warn(f"{folder / NAME} is missing: the files beside it can't be verified", stacklevel=3)
        return
    changed = [name for name, content in manifest.files.items() if not content.is_in(folder / name)]
    left = [name for name in manifest.before or () if name not in manifest.files and os.path.lexists(folder / name)]
    if manifest.before is not None and (changed or left):
        allowed = f"a whole export: writing this one was cut off; resume={folder.parent} writes it again"
        raise BadInput("folder", str(folder), allowed)
    if changed:
        is_there = os.path.lexists(folder / changed[0])
        raise damaged(folder, changed[0], "its bytes don't match their hash" if is_there else "it is missing")


def damaged(folder: Path, name: str, what: str) -> BadInput:
    mend = f"take a copy of it, or export again; if you have changed it yourself, remove {NAME}"
    return BadInput("folder", str(folder), f"as it was exported: {name} is damaged ({what}); {mend}")


def put(fresh: Path, folder: Path, mend: str | None = None) -> None:
    """Move the files of a new export to their place. Raises FileExistsError, before anything is changed, if a file of
    somebody else is in the way.

    Args:
        mend: as in `ours_in`.
    """
    new = {path.name: content_of(path) for path in sorted(fresh.iterdir())}
    before = ours_in(folder, new, mend)
    for name in new:
        flush(fresh / name)
    folder.mkdir(exist_ok=True)
    flush_folder(folder.parent)
    write(folder, Manifest(new, before))
    for name in new:
        (fresh / name).replace(folder / name)
    for name in before.keys() - new.keys():
        (folder / name).unlink()
    flush_folder(folder)
    write(folder, Manifest(new))


def ours_in(folder: Path, names: Iterable[str], mend: str | None = None) -> Files:
    """The files of an earlier export, as they are now.

    Args:
        names: of the files of the new export.
        mend: what the user can do if a file is in the way; None: move it, and resume the run around the folder.

    Raises:
        FileExistsError: a file with one of these names, or of the list's, isn't ours or was changed.
    """
    if not os.path.lexists(folder):
        return {}
    mend = mend or f"move it elsewhere, then go on with resume={folder.parent}"
    if folder.is_symlink() or not folder.is_dir():
        raise in_the_way(folder, mend)
    try:
        manifest = read(folder) or Manifest({})
    except ValueError:
        raise in_the_way(folder / NAME, mend) from None
    known = [*manifest.files.items(), *(manifest.before or {}).items()]
    ours = {name: content for name, content in known if content.is_in(folder / name)}
    wanted = dict.fromkeys([*names, *manifest.files])
    taken = [folder / name for name in wanted if name not in ours and os.path.lexists(folder / name)]
    if taken:
        raise in_the_way(taken[0], mend)
    return ours


class InTheWay(FileExistsError):
    """The user's file has the name of one of ours."""


def in_the_way(path: Path, mend: str) -> InTheWay:
    what = f"{path} is in the way of what lowvram writes, and isn't as lowvram wrote it there ({NAME} tells)"
    return InTheWay(f"{what}: {mend}")
