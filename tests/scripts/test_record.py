"""Recordings of a real allocator: read from torch's snapshots, kept, and replayed to the byte."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from lowvram.config.identity import ROOT
from lowvram.core.step import step
from lowvram.planning.memory.replay import FREE, Event, needs_of, replay
from scripts.benchmarks.record_allocator_trace import CASES, record_apart
from scripts.benchmarks.recorded import Action, Kind, Recording, Sample, actions_of, first_difference, load_recording
from tests.laboratory import CPU, needs_gpu

MIB = 2**20
RECORDINGS = sorted((ROOT / "docs" / "results").glob("*/allocator_traces/*.json.gz"))
SMALL, LARGE, SIDE = 0x7F0000000000, 0x7F0002000000, 0x7F0008000000  # addresses of segments
STREAM = 0x5555AAAA0000  # a handle; the default stream's is 0


def entry(action: str, addr: int, size: int, stream: int = 0) -> dict[str, Any]:
    """As in `device_traces` of torch.cuda.memory._snapshot (torch 2.13)."""
    return {
        "action": action,
        "addr": addr,
        "size": size,
        "stream": stream,
        "frames": [],
        "time_us": 0,
        "pool_id": (0, 0),
        "compile_context": "N/A",
    }


def snapshot(entries: Iterable[dict[str, Any]], segments: dict[int, int]) -> dict[str, Any]:
    """With the sizes of segments by address."""
    described = [{"device": 0, "address": address, "total_size": size} for address, size in segments.items()]
    return {"segments": described, "device_traces": [[*entries]]}


def freed(addr: int, size: int, stream: int = 0) -> list[dict[str, Any]]:
    return [entry("free_requested", addr, size, stream), entry("free_completed", addr, size, stream)]


BY_HAND = snapshot(
    [
        entry("segment_alloc", SMALL, 2 * MIB),
        entry("alloc", SMALL, 1000),
        entry("segment_alloc", LARGE, 20 * MIB),
        entry("alloc", LARGE, 3 * MIB),
        entry("alloc", SMALL + 1024, 10),
        *freed(SMALL, 1000),
        entry("snapshot", 0, 0),
        entry("alloc", SMALL, 700),  # rounded up to 1024: the place that was left
        entry("segment_alloc", SIDE, 2 * MIB, STREAM),
        entry("alloc", SIDE, 512, STREAM),
        entry("free_requested", LARGE, 3 * MIB),  # another stream still uses it
        entry("alloc", LARGE + 3 * MIB, 2 * MIB),
        entry("free_completed", LARGE, 3 * MIB),
        entry("alloc", LARGE, MIB + 1),
    ],
    {SMALL: 2 * MIB, LARGE: 20 * MIB, SIDE: 2 * MIB},
)
SAMPLES = [
    Sample(1, 1024),
    Sample(3, 1024 + 3 * MIB + 512),
    Sample(7, 1024 + 512 + 512),
    Sample(9, 1024 + 512 + 512 + 2 * MIB + MIB + 512),
]


def recording(actions: list[Action], samples: list[Sample] | None = None, **changed: Any) -> Recording:
    plain: dict[str, Any] = {"expandable": False, "limit_bytes": None, "device_bytes": 80 * MIB, "outside_bytes": 0}
    return Recording(point="", torch="2.13.0", device="", actions=actions, samples=samples or [], **plain | changed)


def by_hand() -> Recording:
    return recording(actions_of(BY_HAND), SAMPLES)


# Reading


def test_a_snapshot_is_read() -> None:
    actions = actions_of(BY_HAND)
    assert len(actions) == 14  # torch's notes of its own snapshots are none
    assert actions[0] == Action(Kind.SEGMENT_ALLOC, 0, 2 * MIB, 0)
    assert actions[2] == Action(Kind.SEGMENT_ALLOC, LARGE - SMALL, 20 * MIB, 0)
    assert actions[9] == Action(Kind.ALLOC, SIDE - SMALL, 512, 1)


def test_its_events_are_those_of_a_plan() -> None:
    events = by_hand().events()
    assert events[:4] == [Event(0, 1000), Event(1, 3 * MIB), Event(2, 10), Event(0, FREE)]
    assert events[5] == Event(5, 512, stream=1)
    assert replay(events[:6]).reserved_bytes == 24 * MIB


def test_a_recording_that_began_too_late_is_refused() -> None:
    late = {**BY_HAND, "device_traces": [BY_HAND["device_traces"][0][3:]]}
    with pytest.raises(ValueError, match=f"isn't complete \\(it accounts for {2 * MIB} of {24 * MIB} reserved bytes"):
        actions_of(late)


def test_a_private_pool_is_refused() -> None:
    entries = BY_HAND["device_traces"][0]
    with pytest.raises(ValueError, match="a private pool of a CUDA graph is not replayed"):
        actions_of({**BY_HAND, "device_traces": [[{**entries[0], "pool_id": (0, 1)}, *entries[1:]]]})


def test_torch_before_pools_were_named() -> None:
    entries = [{key: value for key, value in each.items() if key != "pool_id"} for each in BY_HAND["device_traces"][0]]
    assert actions_of({**BY_HAND, "device_traces": [entries]}) == actions_of(BY_HAND)


def test_a_file_keeps_all_of_it(tmp_path: Path) -> None:
    kept = replace(by_hand(), point="model=transformer", limit_bytes=5, outside_bytes=6)
    path = tmp_path / "new" / "kept.json.gz"
    kept.save(path)
    assert load_recording(path) == kept
    assert json.loads(gzip.decompress(path.read_bytes()))["actions"][0] == ["A", 0, 2 * MIB, 0]


# Replaying


def test_the_replay_does_the_same() -> None:
    assert first_difference(by_hand()) is None


@pytest.mark.parametrize(
    ("index", "changed", "message"),
    [
        (4, {"address": 2048}, "address is 1024 in the replay, 2048 in the recording"),
        (2, {"num_bytes": 22 * MIB}, f"reserved is {22 * MIB} in the replay, {24 * MIB} in the recording"),
        (7, {"num_bytes": 1300}, "address is 1536 in the replay, 0 in the recording"),
    ],
)
def test_a_difference_is_found_where_it_is(index: int, changed: dict[str, int], message: str) -> None:
    actions = actions_of(BY_HAND)
    actions[index] = actions[index]._replace(**changed)
    found = first_difference(recording(actions, SAMPLES))
    assert found is not None
    assert found.endswith(message)


def test_a_difference_in_allocated_bytes_is_found() -> None:
    found = first_difference(recording(actions_of(BY_HAND), [*SAMPLES[:2], Sample(7, 2049)]))
    assert found is not None
    assert found.endswith("allocated is 2048 in the replay, 2049 in the recording")


def acted(text: str) -> list[Action]:
    """Actions as "a 0 4" says them: kind, address and bytes, both in MiB."""
    words = [line.split() for line in text.split(", ")]
    return [Action(Kind(kind), int(address) * MIB, int(size) * MIB, 0) for kind, address, size in words]


def test_segments_given_back_when_asked_to() -> None:
    asked = acted("A 0 20, a 0 4, f 0 4, c 0 4, F 0 20, A 100 20, a 100 4, f 100 4, c 100 4, F 100 20")
    assert first_difference(recording(asked)) is None
    asked = acted("A 0 20, a 0 4, A 40 30, a 40 30, f 40 30, c 40 30, F 40 30, f 0 4, c 0 4")
    assert first_difference(recording(asked, limit_bytes=60 * MIB)) is None


def test_segments_given_back_for_want_of_memory() -> None:
    wanting = acted("A 0 20, a 0 4, A 40 30, a 40 30, f 40 30, c 40 30, F 40 30, A 100 40, a 100 40")
    assert first_difference(recording(wanting, limit_bytes=60 * MIB)) is None
    assert needs_of(recording(wanting).events()).least_limit_bytes == 60 * MIB
    found = first_difference(recording(wanting, limit_bytes=58 * MIB))
    assert found is not None
    assert f"reserved is None in the replay, {60 * MIB}" in found


def test_expandable_segments() -> None:
    growing = acted("M 0 20, a 0 15, M 20 20, a 15 15, f 0 15, c 0 15, a 0 12, f 0 12, c 0 12")
    assert first_difference(recording(growing, expandable=True)) is None
    emptied = acted("M 0 20, a 0 20, M 20 20, a 20 15, f 0 20, c 0 20, U 0 20, M 0 20, a 0 8")
    assert first_difference(recording(emptied, expandable=True)) is None
    assert first_difference(recording(emptied)) is not None


# On a device


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: f"{path.parts[-3]}/{path.name.partition('.')[0]}")
def test_every_recorded_trace_is_replayed_to_the_byte(path: Path) -> None:
    kept = load_recording(path)
    assert kept.actions
    assert kept.samples
    assert first_difference(kept) is None
    as_planned = replay(kept.events(), expandable=kept.expandable, limit_bytes=kept.limit_bytes)
    assert as_planned.oom is None
    assert as_planned.reserved_peak_bytes == max(reserved_bytes(kept))


def reserved_bytes(kept: Recording) -> Iterable[int]:
    """After each action."""
    return accumulate(action.kind.sign * action.num_bytes for action in kept.actions)


def test_recordings_hold_both_kinds_of_segments_and_segments_given_back_for_want_of_memory() -> None:
    kept = [load_recording(path) for path in RECORDINGS]
    points = {each.point for each in kept}
    assert {point.replace("allocator=default", "allocator=expandable") for point in points} <= points
    assert len(points) >= 2 * 10
    gave_back = [each for each in kept if any(action.kind.sign < 0 for action in each.actions)]
    assert {each.expandable for each in gave_back} == {False, True}
    assert all(each.limit_bytes is not None for each in gave_back)


def test_cases_are_named_by_what_they_run() -> None:
    assert CASES["resnet_expandable"].point == "model=resnet allocator=expandable train.batch_size=32"
    assert all(case.expandable == name.endswith("expandable") for name, case in CASES.items())


@pytest.mark.parametrize(("torch_version", "start"), [("2.12.1", 0), ("2.13.0", 32 * MIB)])
def test_of_equal_free_blocks_the_oldest_or_the_lowest_is_taken(torch_version: str, start: int) -> None:
    actions: list[Action] = []
    for address in (32 * MIB, 0):  # the first segment lies above the second
        actions += [Action(kind, address, 20 * MIB, 0) for kind in (Kind.SEGMENT_ALLOC, Kind.ALLOC)]
    for address in (32 * MIB, 0):
        actions += [Action(kind, address, 20 * MIB, 0) for kind in (Kind.FREE_REQUESTED, Kind.FREE_COMPLETED)]
    actions.append(Action(Kind.ALLOC, start, 20 * MIB, 0))
    assert first_difference(replace(recording(actions), torch=torch_version)) is None
    actions[-1] = Action(Kind.ALLOC, 32 * MIB - start, 20 * MIB, 0)
    assert first_difference(replace(recording(actions), torch=torch_version)) is not None


@pytest.mark.parametrize("name", ["transformer_bf16_every1", "resnet"])
def test_a_case_runs(name: str) -> None:
    case = replace(CASES[name], batch_size=2)
    _, update = step(case.rig(CPU), case.batch(CPU))
    assert update.applied


@pytest.mark.parametrize("name", ["transformer_expandable", "resnet"])
@pytest.mark.gpu
@needs_gpu[1]
def test_a_trace_of_this_device_is_replayed_to_the_byte(name: str, tmp_path: Path) -> None:
    kept = record_apart(name, tmp_path / "trace.json.gz")
    assert kept.expandable == name.endswith("expandable")
    assert len(kept.actions) > 100
    assert len(kept.samples) > 100
    assert first_difference(kept) is None


@pytest.mark.gpu
@needs_gpu[1]
def test_under_the_least_limit_segments_are_given_back_and_the_replay_does_the_same(tmp_path: Path) -> None:
    free = record_apart("transformer", tmp_path / "free.json.gz")
    limit_bytes = needs_of(free.events()).least_limit_bytes
    limited = record_apart("transformer", tmp_path / "limited.json.gz", limit_bytes)
    assert limited.limit_bytes == limit_bytes <= max(reserved_bytes(free))
    is_less = limit_bytes < max(reserved_bytes(free))  # not on an H200, whose libraries take more at first
    assert any(action.kind is Kind.SEGMENT_FREE for action in limited.actions) == is_less
    assert first_difference(limited) is None
