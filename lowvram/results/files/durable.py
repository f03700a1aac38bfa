"""Writes files atomically: a reader sees the old file or the new one, also after a power cut. Imports no torch.

A file is written under a free name beside its final one, flushed to the disk, and renamed; then the folder is flushed.
A process that dies in between leaves the old file, and at most a leftover beside it, whose name matches `LEFTOVER`.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from lowvram.results.files.lease import check_ours

LEFTOVER = re.compile(r"\..+\.[0-9a-f]{16}\.unfinished")
NOT_FOR_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)  # errors of file systems that can't flush folders


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """A new, empty file beside `path`, for `settle`; removed at the end if it wasn't moved. An OSError raised inside
    that names no file, as those of `write` and `fsync`, names this one."""
    check_ours(path)
    beside = unfinished_name(path)
    os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    try:
        yield beside
    except OSError as error:
        name_file(error, path)
        raise
    finally:
        with suppress(OSError):  # it was moved if all went well; else the earlier error counts
            beside.unlink()


@contextmanager
def unfinished_folder(path: Path) -> Iterator[Path]:
    """A new, empty folder beside `path`; removed at the end, with what is still in it. What a failing disk keeps
    there is a leftover. OSErrors as in `unfinished`."""
    check_ours(path)
    beside = unfinished_name(path)
    beside.mkdir()
    try:
        yield beside
    except OSError as error:
        name_file(error, path)
        raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def unfinished_name(path: Path) -> Path:
    """A free name beside `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.unfinished")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside it an OSError that names no file, as those of `write` and `fsync`, gets the name of this one."""
    try:
        yield
    except OSError as error:
        name_file(error, path)
        raise


def name_file(error: OSError, path: Path) -> None:
    """Let an error of the system's that names no file name this one. Others have a text of their own."""
    if error.errno is not None and error.filename is None:
        error.filename = str(path)


def settle(beside: Path, path: Path) -> None:
    """Flush a written file and rename it to `path`, replacing an older one: a power cut leaves one of the two whole."""
    flush(beside)
    check_ours(path)
    beside.replace(path)
    flush_folder(path.parent)


def settle_folder(beside: Path, path: Path) -> None:
    """The same of a folder whose files are flushed. Nothing may have the name `path`."""
    flush_folder(beside)
    check_ours(path)
    beside.rename(path)
    flush_folder(path.parent)


def write(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Replace a file as a whole by what `fill` writes into the file that it is given."""
    with unfinished(path) as beside:
        with beside.open("wb") as file:
            fill(file)
        settle(beside, path)


def write_bytes(path: Path, data: bytes) -> None:
    write(path, lambda file: file.write(data))


def write_text(path: Path, text: str) -> None:
    """Replace a file by text in UTF-8. Lone surrogates, which file names may have, are written as escapes."""
    write_bytes(path, text.encode(errors="backslashreplace"))


def made_private(path: Path, data: bytes) -> None:
    """Make a file that the user alone may read, whole at once. Raises FileExistsError if there is one."""
    beside = unfinished_name(path)
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)  # whatever the umask
        os.write(fd, data)
        os.fsync(fd)
        os.link(beside, path)  # which replaces nothing
    finally:
        os.close(fd)
        beside.unlink()


def flush(path: Path) -> None:
    """Flush the content of a file to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        name_file(error, path)
        raise
    finally:
        os.close(fd)


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, if the file system can do that."""
    try:
        flush(folder)
    except OSError as error:
        if error.errno not in NOT_FOR_FOLDERS:
            raise


def made_folders(folder: Path) -> list[Path]:
    """Make a folder and its parents; returns those that this call created, the uppermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    created: list[Path] = []
    for path in reversed(missing):
        with suppress(FileExistsError):  # another program was faster
            path.mkdir()
            created.append(path)
            flush_folder(path.parent)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    return created


def remove_files(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(FileNotFoundError):
            path.unlink()


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove the folders that are empty, the lowest first."""
    for folder in reversed(list(folders)):
        with suppress(OSError):
            folder.rmdir()


def remove_leftovers(folder: Path) -> None:
    """Remove what programs that died have left in a folder. The caller must know that no program writes there now."""
    check_ours(folder)
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in [path for path in folder.iterdir() if LEFTOVER.fullmatch(path.name)]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
