"""offload=activations_disk: a file that nobody sees, that grows, and a disk that is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lowvram.compat.torch_fake import FakeTensor, FakeTensorMode
from lowvram.config.errors import BadInput
from lowvram.core import host
from lowvram.core.assemble import assemble
from lowvram.core.step import step
from lowvram.knobs.offload import ActivationsOnDisk
from lowvram.knobs.offload import buffers as room
from lowvram.knobs.offload.buffers import File
from lowvram.loops.fields import status_bytes
from lowvram.worker.errors import ending
from tests.laboratory import CPU, PROBLEMS, knobs_of, make_batch

PAGE = 4096


def test_a_region_keeps_what_is_written_and_has_no_name(tmp_path: Path) -> None:
    """Without a name at once, so that not even a kill leaves a file."""
    file = File(str(tmp_path))
    regions = [file.region(num_bytes) for num_bytes in (1, PAGE, 3 * PAGE + 1, 100_000)]
    for number, region in enumerate(regions):
        region.bytes.fill_(number)
        region.settle()
    assert [len(region.bytes) for region in regions] == [1, PAGE, 3 * PAGE + 1, 100_000]
    assert all(bool((region.bytes == number).all()) for number, region in enumerate(regions))
    assert all(host.is_marked(region.bytes.untyped_storage()) for region in regions)
    assert not list(tmp_path.iterdir())


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_region_outlives_its_file(tmp_path: Path) -> None:
    region = File(str(tmp_path)).region(PAGE)
    region.bytes.fill_(7)
    assert bool((region.bytes == 7).all())


def test_few_pieces_hold_many_regions(tmp_path: Path) -> None:
    """Each piece takes a file descriptor."""
    before = num_descriptors()
    file = File(str(tmp_path))
    regions = [file.region(PAGE) for _ in range(1000)]
    assert num_descriptors() - before <= 12
    assert file._num_bytes <= 2 * 1000 * PAGE
    del regions


def test_its_pages_are_no_memory_of_the_process(tmp_path: Path) -> None:
    region = File(str(tmp_path)).region(2**26)
    before = status_bytes("VmRSS")
    region.bytes.fill_(1)
    filled = status_bytes("VmRSS") - before
    region.settle()
    assert filled > 2**25
    assert status_bytes("VmRSS") - before < 2**23
    assert int(region.bytes[-1]) == 1


def test_the_file_grows_in_the_first_step_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grown_bytes: list[int] = []
    reserve = os.posix_fallocate

    def count(file: int, start: int, num_bytes: int) -> None:
        grown_bytes.append(num_bytes)
        reserve(file, start, num_bytes)

    monkeypatch.setattr(room.os, "posix_fallocate", count)
    task = PROBLEMS["transformer"]
    rig = assemble(task, knobs_of(offload=ActivationsOnDisk(str(tmp_path)), accum="x4"), CPU)
    moved_before = host.traffic.to_host_bytes
    step(rig, make_batch(task.spec, 64))
    first, moved_bytes = sum(grown_bytes), host.traffic.to_host_bytes - moved_before
    assert 0 < first < 0.6 * moved_bytes  # of four parts
    step(rig, make_batch(task.spec, 64, seed=1))
    assert sum(grown_bytes) == first


def test_a_step_on_paper_writes_nothing(tmp_path: Path) -> None:
    with FakeTensorMode():
        region = File(str(tmp_path / "nowhere")).region(2**50)
        assert isinstance(region.bytes, FakeTensor)


def test_a_full_disk_ends_the_point_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(room.os, "posix_fallocate", refuse)
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
