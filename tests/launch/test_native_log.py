"""Logs of native code: the beginning and the end of what is too long, while processes go on writing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lowvram.launch.native_log import KEPT_BYTES, LARGEST_BYTES, NativeLogs
from lowvram.worker import main


def test_what_is_too_long_keeps_beginning_and_end(tmp_path: Path) -> None:
    logs, path = NativeLogs(tmp_path), tmp_path / "native.1.log"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"a" * LARGEST_BYTES)
    logs.cut()
    assert path.stat().st_size == LARGEST_BYTES
    os.write(fd, b"b" * LARGEST_BYTES)
    logs.cut()
    first, word, last = path.read_bytes().partition(
        f"\n... lowvram has cut {2 * LARGEST_BYTES - 2 * KEPT_BYTES:,}".encode()
    )
    assert first == b"a" * KEPT_BYTES
    assert word
    assert last == b" bytes here ...\n" + b"b" * KEPT_BYTES
    written = path.stat().st_size + LARGEST_BYTES
    os.write(fd, b"c" * LARGEST_BYTES)
    logs.look()
    num_cut = 2 * LARGEST_BYTES - 2 * KEPT_BYTES + written - 2 * KEPT_BYTES
    assert f"has cut {num_cut:,} bytes".encode() in path.read_bytes()
    os.write(fd, b"d" * LARGEST_BYTES)
    logs.look()  # a moment later: it is not time yet
    assert path.stat().st_size > LARGEST_BYTES
    os.close(fd)


def test_what_is_no_file_is_let_alone(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"x" * (LARGEST_BYTES + 1))
    (tmp_path / "native.log").symlink_to("elsewhere")
    os.mkfifo(tmp_path / "native.1.log")
    (tmp_path / "native.2.log").mkdir()
    NativeLogs(tmp_path).cut()
    assert (tmp_path / "elsewhere").stat().st_size == LARGEST_BYTES + 1


def test_a_disk_that_cannot_truncate_it_is_told_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def truncate(fd: int, size: int) -> None:
        os.close(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(main, "write_proc", lambda name, text: None)
    monkeypatch.setattr(os, "ftruncate", truncate)
    with pytest.raises(OSError, match=r"Input/output error: '.*native\.log'"):
        main.prepare(tmp_path / "native.log")
