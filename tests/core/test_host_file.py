"""A file in the place of host memory: nobody sees it, and it grows."""

from __future__ import annotations

from pathlib import Path

import torch

from lowvram.compat.torch_fake import FakeTensor, FakeTensorMode
from lowvram.core import host
from lowvram.core.host_file import HostFile, file_of
from lowvram.loops.fields import status_bytes

PAGE = 4096


def test_a_region_keeps_what_is_written_and_has_no_name(tmp_path: Path) -> None:
    """Without a name at once, so that not even a kill leaves a file."""
    file = HostFile(str(tmp_path))
    regions = [file.region(num_bytes) for num_bytes in (1, PAGE, 3 * PAGE + 1, 100_000)]
    for number, (region, settle) in enumerate(regions):
        region.fill_(number)
        settle()
    assert [len(region) for region, _ in regions] == [1, PAGE, 3 * PAGE + 1, 100_000]
    assert all(bool((region == number).all()) for number, (region, _) in enumerate(regions))
    assert all(host.holds(region) for region, _ in regions)
    assert not list(tmp_path.iterdir())


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_region_outlives_its_file(tmp_path: Path) -> None:
    region, _ = HostFile(str(tmp_path)).region(PAGE)
    region.fill_(7)
    assert bool((region == 7).all())


def test_few_pieces_hold_many_regions(tmp_path: Path) -> None:
    """Each piece takes a file descriptor."""
    before = num_descriptors()
    file = HostFile(str(tmp_path))
    regions = [file.region(PAGE) for _ in range(1000)]
    assert num_descriptors() - before <= 12
    assert file._num_bytes <= 2 * 1000 * PAGE
    del regions


def test_its_pages_are_no_memory_of_the_process(tmp_path: Path) -> None:
    region, settle = HostFile(str(tmp_path)).region(2**26)
    before = status_bytes("VmRSS")
    region.fill_(1)
    filled = status_bytes("VmRSS") - before
    settle()
    assert filled > 2**25
    assert status_bytes("VmRSS") - before < 2**23
    assert int(region[-1]) == 1


def test_a_step_on_paper_writes_nothing(tmp_path: Path) -> None:
    with FakeTensorMode():
        region, _ = HostFile(str(tmp_path / "nowhere")).region(2**50)
        assert isinstance(region, FakeTensor)


def test_a_tensor_in_it_is_like_another(tmp_path: Path) -> None:
    file = HostFile(str(tmp_path))
    for like in (torch.randn(3, 4), torch.randn(4, 3).T, torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)):
        there = file.empty_like(like)
        assert (there.shape, there.stride(), there.dtype) == (like.shape, like.stride(), like.dtype)
        assert file_of(there) is file
    assert file_of(torch.ones(1)) is None
    assert file.empty_like(torch.ones(0, 3)).shape == (0, 3)


def test_what_moves_there_stays_the_tensor_that_it_is(tmp_path: Path) -> None:
    file, large, small = HostFile(str(tmp_path)), torch.arange(5000.0), torch.arange(3.0)
    held = large, small
    for tensor in held:
        file.take_in(tensor)
    assert (file_of(large), file_of(small)) == (file, None)
    assert torch.equal(held[0], torch.arange(5000.0))
    memory = large.data_ptr()
    file.take_in(large)
    assert large.data_ptr() == memory
