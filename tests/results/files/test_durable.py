"""Files that are there as a whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from lowvram.results.files import durable
from lowvram.results.files.durable import (
    LEFTOVER,
    flush_folder,
    remove_leftovers,
    unfinished_folder,
    unfinished_name,
    write,
    write_text,
)
from lowvram.results.row import empty_row
from lowvram.results.row import write as write_row


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("old")
    done: list[Any] = []
    fsync, replace = os.fsync, os.replace

    def flushed(fd: int) -> None:
        fsync(fd)
        done.append(os.fstat(fd).st_ino)

    def moved(source: Path, target: Path) -> None:
        assert target.read_text() == "old"
        replace(source, target)
        done.append("moved")

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", moved)
    write_text(tmp_path / "a", "new")
    assert done == [(tmp_path / "a").stat().st_ino, "moved", tmp_path.stat().st_ino]
    done.clear()
    (tmp_path / "result.json").write_text("old")
    write_row(tmp_path, empty_row())
    assert done == [(tmp_path / "result.json").stat().st_ino, "moved", tmp_path.stat().st_ino]


@pytest.mark.parametrize("name", ["open", "fsync", "replace"])
def test_what_fails_leaves_the_old_file_and_nothing_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("old")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, name, full)
        with pytest.raises(OSError, match="No space") as failed:
            write_text(tmp_path / "a", "new")
        if name != "open":  # whose own errors name it
            assert Path(str(failed.value.filename)).name.strip(".").startswith("a")
    with pytest.raises(ZeroDivisionError):
        write(tmp_path / "a", lambda file: 1 // file.write(b""))
    with pytest.raises(OSError, match="full") as failed, unfinished_folder(tmp_path / "b"):
        raise OSError(errno.ENOSPC, "full")
    assert failed.value.filename == str(tmp_path / "b")
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_text_with_half_characters_is_written(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "x\udcff\n")
    assert (tmp_path / "a").read_bytes() == b"x\\udcff\n"


def test_a_file_system_that_flushes_no_folders_is_as_good_as_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> None:
        def fail(_: Path) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(durable, "flush", fail)

    refuse(errno.EINVAL)
    flush_folder(Path())
    refuse(errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        flush_folder(Path())


def test_what_the_dead_have_left_goes_and_nothing_else(tmp_path: Path) -> None:
    left = unfinished_name(tmp_path / "a")
    assert LEFTOVER.fullmatch(left.name)
    for name in (left.name, "a", ".a.unfinished", "unfinished", ".a.0123456789abcdeg.unfinished"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".a.0123456789abcdeg.unfinished", ".a.unfinished", "a", "unfinished"]
    remove_leftovers(tmp_path / "none")


def test_the_first_error_is_reported_where_nothing_can_be_removed_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "a", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    write_text(tmp_path / "b", "whole")
    assert (tmp_path / "b").read_text() == "whole"
