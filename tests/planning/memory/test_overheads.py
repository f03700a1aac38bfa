"""The memory that no tracer sees."""

from __future__ import annotations

import pytest

from lowvram.planning.devices import DeviceSpec, device_names, load_device
from lowvram.planning.memory.context import context_bytes
from lowvram.planning.memory.overheads import (
    OBJECTS,
    ON_CPU,
    PAGES,
    ROWS,
    Overhead,
    onednn_overheads,
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


def test_the_context_lies_outside_the_allocator_and_in_a_range() -> None:
    (found,) = [line for line in process_overheads(load_device("rtx3060"), "2.13.0") if line.name == "CUDA context"]
    assert (found.least_bytes, found.num_bytes) == context_bytes(28)
    assert not found.is_in_allocator
    assert "CUDA context" not in [line.name for line in process_overheads(load_device("cpu"), "2.13.0")]


@pytest.mark.parametrize(("multiprocessors", "seen_mib"), [(28, (107, 141)), (142, (426, 426)), (132, (527, 840))])
def test_what_contexts_took_lies_in_the_range(multiprocessors: int, seen_mib: tuple[int, int]) -> None:
    least, most = context_bytes(multiprocessors)
    assert least <= seen_mib[0] * MIB <= seen_mib[1] * MIB <= most
    unknown_least, unknown_most = context_bytes(None)
    assert unknown_least <= least < most
    assert unknown_most >= seen_mib[1] * MIB


def test_one_rank_talks_to_nobody() -> None:
    assert "NCCL" not in lines("9.0")
    assert not lines("9.0", num_ranks=2)["NCCL"].is_in_allocator


def test_of_a_processor_the_pages_of_libraries_are_known_for_one_version() -> None:
    pages, objects, scratch, unknown = process_overheads(load_device("cpu"), "2.13.0+cpu")
    assert (pages.name, pages.num_bytes, pages.is_in_allocator, pages.is_capped) == (PAGES, 34 * MIB, False, False)
    assert (objects.name, objects.num_bytes, objects.is_capped) == (OBJECTS, 2 * MIB, True)
    assert (scratch.num_bytes, scratch.is_capped, scratch.is_resident) == (4 * MIB, True, False)
    assert [line.margin_bytes for line in (objects, scratch, unknown)] == [0, 5 * MIB, 0]
    assert unknown.num_bytes is None
    for other in ("2.12.1", "2.14.0"):
        lines = process_overheads(load_device("cpu"), other)
        assert {line.num_bytes for line in lines} == {None}
        assert None in [line.margin_bytes for line in lines if line.is_capped]


def test_convolutions_of_a_processor_have_lines_of_their_own() -> None:
    """A shape takes room under a cap, of which little is touched; so a model of one shape is not charged for many."""
    room, touched = onednn_overheads(4, False, "2.13.0+cpu")
    assert (room.num_bytes, room.margin_bytes) == (13 * MIB, 2 * MIB)
    assert (room.is_capped, room.is_resident) == (True, False)
    assert (touched.num_bytes, touched.is_capped, touched.is_resident) == (12 * MIB, False, True)
    (one_shape, _) = onednn_overheads(1, False, "2.13.0+cpu")
    assert one_shape.num_bytes == 13 * MIB // 4
    assert not onednn_overheads(0, False, "2.13.0+cpu")


def test_products_in_16_bits_take_more_on_a_processor() -> None:
    (narrow,) = onednn_overheads(0, True, "2.13.0+cpu")
    assert (narrow.num_bytes, narrow.margin_bytes) == (14 * MIB, 3 * MIB)
    assert onednn_overheads(2, True, "2.13.0+cpu")[-1] == narrow


def test_what_onednn_takes_with_other_versions_is_unknown() -> None:
    known, elsewhere = (onednn_overheads(3, True, version) for version in ("2.13.0+cpu", "2.14.1"))
    assert [line.name for line in elsewhere] == [line.name for line in known]
    assert {(line.num_bytes, line.margin_bytes) for line in elsewhere} == {(None, None)}


@pytest.mark.parametrize("torch_version", VERSIONS)
@pytest.mark.parametrize("name", [name for name in device_names() if name != "cpu"])
def test_every_device_has_the_same_lines(name: str, torch_version: str) -> None:
    names = [line.name for line in process_overheads(load_device(name), torch_version, num_ranks=2)]
    assert set(names) == {*(row.line.name for row in ROWS), "CUDA context"}


def test_every_line_has_its_source_and_says_what_is_unknown() -> None:
    for row in [*ROWS, *ON_CPU]:
        assert row.line.source
        assert (row.line.num_bytes is None) == row.line.source.startswith("unknown"), row.line


def test_versions_are_read_as_torch_writes_them() -> None:
    assert [parsed(version) for version in VERSIONS] == [(2, 11), (2, 12), (2, 13), (2, 14), (2, 15)]
