"""The memory that no tracer sees."""

from __future__ import annotations

import pytest

from lowvram.planning.devices import DeviceSpec, device_names, load_device
from lowvram.planning.memory.overheads import (
    OBJECTS,
    ON_CPU,
    PAGES,
    ROWS,
    Overhead,
    convolution_overheads,
    parsed,
    process_overheads,
)

MIB = 2**20
VERSIONS = ["2.11.0", "2.12.1", "2.13.0+cu130", "2.14.0", "2.15.0.dev20260905"]


def lines(capability: str, torch_version: str = "2.13.0", num_ranks: int = 1) -> dict[str, Overhead]:
    found = process_overheads(DeviceSpec(compute_capability=capability), torch_version, num_ranks)
    assert len({line.name for line in found}) == len(found)
    return {line.name: line for line in found}


@pytest.mark.parametrize(
    ("capability", "torch_version", "num_bytes"),
    [
        ("7.5", "2.11.0", 8519680),
        ("8.6", "2.13.0+cu130", 8519680),
        ("9.0", "2.11.0", 32 * MIB),
        ("9.0", "2.13.0", 32 * MIB),
        ("12.0", "2.13.0", 32 * MIB),
        ("12.0", "2.11.0", None),  # it changed some time between
        ("9.0", "2.15.0", None),  # no longer kept
    ],
)
def test_cublas_takes_a_workspace_for_each_direction(
    capability: str, torch_version: str, num_bytes: int | None
) -> None:
    found = lines(capability, torch_version)
    names = [name for name in found if name.startswith("cuBLAS ")]
    assert names == ["cuBLAS workspace of the forward pass", "cuBLAS workspace of the backward pass"]
    assert [found[name].num_bytes for name in names] == [num_bytes] * 2
    assert all(found[name].is_in_allocator for name in names)


def test_cublaslt_shares_it() -> None:
    assert lines("8.6")["cublasLt workspace"].num_bytes == 0
    assert lines("8.6", "2.15.0")["cublasLt workspace"].num_bytes is None


def test_the_context_lies_outside_the_allocator() -> None:
    assert lines("8.9")["CUDA context"].num_bytes == 426 * MIB
    assert lines("8.6")["CUDA context"].num_bytes == 426 * MIB
    assert lines("8.6")["CUDA context"].source.startswith("assumed")
    assert not lines("8.6")["CUDA context"].is_in_allocator


def test_one_rank_talks_to_nobody() -> None:
    assert "NCCL" not in lines("9.0")
    assert not lines("9.0", num_ranks=2)["NCCL"].is_in_allocator


def test_of_a_processor_the_pages_of_libraries_are_known_for_one_version() -> None:
    pages, objects, unknown = process_overheads(load_device("cpu"), "2.13.0+cpu")
    assert (pages.name, pages.num_bytes, pages.is_in_allocator, pages.is_capped) == (PAGES, 34 * MIB, False, False)
    assert (objects.name, objects.num_bytes, objects.is_capped) == (OBJECTS, 2 * MIB, True)
    assert unknown.num_bytes is None
    for other in ("2.12.1", "2.14.0"):
        assert [line.num_bytes for line in process_overheads(load_device("cpu"), other)] == [None, None, None]


def test_convolutions_of_a_processor_have_lines_of_their_own() -> None:
    """A shape takes room under a cap, and hardly any of it is touched."""
    room, constant = convolution_overheads(3, "2.13.0+cpu")
    assert (room.num_bytes, room.is_capped, room.is_resident) == (6 * MIB, True, False)
    assert (constant.num_bytes, constant.is_capped, constant.is_resident) == (12 * MIB, True, True)
    assert not convolution_overheads(0, "2.13.0+cpu")
    elsewhere = convolution_overheads(3, "2.14.1")
    assert [line.name for line in elsewhere] == [room.name, constant.name]
    assert all(line.num_bytes is None and line.source.startswith("unknown") for line in elsewhere)


@pytest.mark.parametrize("torch_version", VERSIONS)
@pytest.mark.parametrize("name", [name for name in device_names() if name != "cpu"])
def test_every_device_has_the_same_lines(name: str, torch_version: str) -> None:
    names = [line.name for line in process_overheads(load_device(name), torch_version, num_ranks=2)]
    assert set(names) == {row.line.name for row in ROWS}


def test_every_line_has_its_source_and_says_what_is_unknown() -> None:
    for row in [*ROWS, *ON_CPU]:
        assert row.line.source
        assert (row.line.num_bytes is None) == row.line.source.startswith("unknown"), row.line


def test_versions_are_read_as_torch_writes_them() -> None:
    assert [parsed(version) for version in VERSIONS] == [(2, 11), (2, 12), (2, 13), (2, 14), (2, 15)]
