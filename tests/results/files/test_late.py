"""Waiting for files of another machine, whose file system is told by a table as the kernel's."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowvram.results.files import late
from lowvram.results.files.late import is_shared, is_there_in_time


def mount(monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str) -> None:
    """Let a folder be on a file system of this kind."""
    device, table = os.stat(folder).st_dev, folder / "mountinfo"  # noqa: PTH116
    about = f"{os.major(device)}:{os.minor(device)}"
    table.write_text(
        f"1 0 0:9999 / /proc rw - proc proc rw\n2 0 {about} / /home rw shared:1 - {kind} server:/home rw\n"
    )
    monkeypatch.setattr(late, "MOUNTS", table)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("nfs4", True), ("fuse.sshfs", True), ("lustre", True), ("ext4", False), ("tmpfs", False), ("overlay", False)],
)
def test_a_folder_is_shared_by_its_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, expected: bool
) -> None:
    mount(monkeypatch, tmp_path, kind)
    assert is_shared(tmp_path) is expected
    monkeypatch.setattr(late, "MOUNTS", tmp_path / "nowhere")
    assert not is_shared(tmp_path)


def test_what_comes_in_time_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a folder that itself is seen late."""
    mount(monkeypatch, tmp_path, "nfs4")
    path = tmp_path / "snapshots" / "state.pt"

    def write() -> None:
        path.parent.mkdir()
        path.touch()

    threading.Timer(0.3, write).start()
    assert is_there_in_time(path.exists, [path.parent])


def test_what_does_not_come_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pytest.fail("there is nothing to wait for"))
    monkeypatch.setattr(late, "time", clock)
    assert not is_there_in_time(path.exists, [tmp_path])
    mount(monkeypatch, tmp_path, "nfs4")
    assert not is_there_in_time(path.exists, [tmp_path], until_s=time.monotonic())
    path.touch()
    assert is_there_in_time(path.exists, [tmp_path])
