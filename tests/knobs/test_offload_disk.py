"""offload=activations_disk: a file that nobody sees, that grows, and a disk that is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lowvram.config.errors import BadInput
from lowvram.core import host, host_file
from lowvram.core.assemble import assemble
from lowvram.core.step import step
from lowvram.knobs.offload import ActivationsOnDisk
from lowvram.worker.errors import ending
from tests.laboratory import CPU, PROBLEMS, knobs_of, make_batch

PAGE = 4096


def test_the_file_grows_in_the_first_step_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grown_bytes: list[int] = []
    reserve = os.posix_fallocate

    def count(file: int, start: int, num_bytes: int) -> None:
        grown_bytes.append(num_bytes)
        reserve(file, start, num_bytes)

    monkeypatch.setattr(host_file.os, "posix_fallocate", count)
    task = PROBLEMS["transformer"]
    rig = assemble(task, knobs_of(offload=ActivationsOnDisk(str(tmp_path)), accum="x4"), CPU)
    moved_before = host.traffic.to_host_bytes
    step(rig, make_batch(task.spec, 64))
    first, moved_bytes = sum(grown_bytes), host.traffic.to_host_bytes - moved_before
    assert 0 < first < 0.6 * moved_bytes  # of four parts
    step(rig, make_batch(task.spec, 64, seed=1))
    assert sum(grown_bytes) == first


def test_a_full_disk_ends_the_point_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(host_file.os, "posix_fallocate", refuse)
    task = PROBLEMS["transformer"]
    rig = assemble(task, knobs_of(offload=ActivationsOnDisk(str(tmp_path))), CPU)
    with pytest.raises(OSError, match="No space left on device") as caught:
        step(rig, make_batch(task.spec, 32))
    reason = f"the disk is full, in the forward pass: {tmp_path}"
    assert ending(caught.value) == {"status": "error", "reason": reason}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["/does/not/exist", "/proc/version"])
def test_a_folder_that_is_none_is_refused(folder: str) -> None:
    allowed = r"must be null or a folder that exists and can be written to"
    with pytest.raises(BadInput, match=rf"offload\.folder='{folder}': {allowed}"):
        ActivationsOnDisk(folder)
