"""What a real device's allocator did, as recorded, and whether the replay does the same to the byte. Imports no torch.

torch records every action of the allocator (torch.cuda.memory._record_memory_history, and `device_traces` of
torch.cuda.memory._snapshot). scripts/benchmarks/record_allocator_trace.py keeps some in docs/results.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from lowvram.planning.memory.allocator import CachingAllocator, OutOfMemory
from lowvram.planning.memory.replay import FREE, Event
from lowvram.planning.memory.segments import Block

ELSEWHERE = 2**60  # the address of a segment that the recording doesn't have


class Kind(StrEnum):
    """Of an action, by one letter in the file."""

    ALLOC = "a"
    FREE_REQUESTED = "f"  # by its owner
    FREE_COMPLETED = "c"  # no other stream uses it any more
    SEGMENT_ALLOC = "A"
    SEGMENT_FREE = "F"
    SEGMENT_MAP = "M"  # pages of an expandable segment
    SEGMENT_UNMAP = "U"

    @property
    def sign(self) -> int:
        """What it does to reserved memory."""
        return {"A": 1, "M": 1, "F": -1, "U": -1}.get(self, 0)


class Action(NamedTuple):
    """Of the allocator; an allocation's bytes are those that were asked for."""

    kind: Kind
    address: int  # counted from the lowest
    num_bytes: int
    stream: int  # 0, 1, … in the order of their handles


class Sample(NamedTuple):
    """What `torch.cuda.memory_stats` said between two actions."""

    num_events: int  # allocations and requests to free so far
    allocated_bytes: int


@dataclass(frozen=True)
class Recording:
    """All that the allocator of one device did, from its first allocation on."""

    point: str  # what ran, in words of the command line
    torch: str
    device: str
    device_bytes: int  # torch.cuda.get_device_properties().total_memory
    expandable: bool
    limit_bytes: int | None  # of torch.cuda.set_per_process_memory_fraction
    outside_bytes: int  # at the end, taken of the device but not by this allocator: CUDA contexts, other processes
    samples: list[Sample]
    actions: list[Action]

    def events(self) -> list[Event]:
        """What was asked of the allocator, as a plan would say it."""
        events: list[Event] = []
        living: dict[int, int] = {}  # by address
        for kind, address, num_bytes, stream in self.actions:
            if kind is Kind.ALLOC:
                living[address] = len(events)
                events.append(Event(living[address], num_bytes, stream))
            elif kind is Kind.FREE_REQUESTED:
                events.append(Event(living.pop(address), FREE, stream))
        return events

    def save(self, path: Path) -> None:
        """As compressed JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), separators=(",", ":")) + "\n"
        path.write_bytes(gzip.compress(text.encode(), mtime=0))


def load_recording(path: Path) -> Recording:
    values = json.loads(gzip.decompress(path.read_bytes()))
    samples = [Sample(*sample) for sample in values.pop("samples")]
    actions = [Action(Kind(kind), *rest) for kind, *rest in values.pop("actions")]
    return Recording(**values, samples=samples, actions=actions)


def actions_of(snapshot: Mapping[str, Any], device: int = 0) -> list[Action]:
    """The actions in a snapshot of `torch.cuda.memory._snapshot`, in their order.

    Raises:
        ValueError: the recording began after the first allocation, lost its beginning, or holds private pools (of CUDA
            graphs), which aren't replayed.
    """
    names = {kind.name.lower(): kind for kind in Kind}
    entries = [entry for entry in snapshot["device_traces"][device] if entry["action"] in names]
    if any(tuple(entry.get("pool_id", (0, 0))) != (0, 0) for entry in entries):
        raise ValueError("a private pool of a CUDA graph is not replayed: record without one")
    lowest = min((entry["addr"] for entry in entries), default=0)
    streams = {handle: number for number, handle in enumerate(sorted({entry["stream"] for entry in entries}))}
    actions = [
        Action(names[entry["action"]], entry["addr"] - lowest, entry["size"], streams[entry["stream"]])
        for entry in entries
    ]
    recorded_bytes = sum(action.kind.sign * action.num_bytes for action in actions)
    reserved_bytes = sum(segment["total_size"] for segment in snapshot["segments"] if segment["device"] == device)
    if recorded_bytes != reserved_bytes:
        reason = f"it accounts for {recorded_bytes} of {reserved_bytes} reserved bytes"
        raise ValueError(f"the recording isn't complete ({reason}): begin it before the first allocation")
    return actions


def first_difference(recording: Recording) -> str | None:
    """Where the replay leaves the recording: in the address of an allocation, in reserved bytes after any action, or in
    allocated bytes at any sample. None: nowhere."""
    player = Player(recording)
    allocated = dict(recording.samples)
    for index, (segments, action) in enumerate(requests(recording.actions)):
        expected = {"reserved": player.reserved_bytes + sum(each.kind.sign * each.num_bytes for each in segments)}
        try:
            found = player.play(segments, action)
        except OutOfMemory:
            found = {"reserved": None}
        if action is not None:
            expected |= {"address": action.address, "allocated": allocated.get(player.num_events)}
        for name, value in found.items():
            if expected.get(name, value) not in (value, None):
                return f"request {index}, {action}: {name} is {value} in the replay, {expected[name]} in the recording"
    return None


def requests(actions: Sequence[Action]) -> Iterator[tuple[list[Action], Action | None]]:
    """What the process asked for, each with what became of segments just before; at last, perhaps, that alone."""
    segments: list[Action] = []
    for action in actions:
        if action.kind.sign:
            segments.append(action)
        else:
            yield segments, action
            segments = []
    if segments:
        yield segments, None


def orders_by_age(torch: str) -> bool:
    """Whether this version takes the free block of the oldest segment among those of equal size (pytorch#183591); else
    it takes that of the lowest address."""
    major, minor, *_ = torch.split(".")
    return (int(major), int(minor)) >= (2, 13)


class Player:
    """The replay of a recording, step by step."""

    def __init__(self, recording: Recording) -> None:
        self.allocator = CachingAllocator(
            recording.expandable, recording.limit_bytes, recording.device_bytes, self.next_address
        )
        self.is_by_age = orders_by_age(recording.torch)
        self.segments: dict[int, int] = {}  # addresses of segments in the recording, by those in the replay
        self.is_limited = recording.limit_bytes is not None
        self.living: dict[int, Block] = {}  # by address
        self.addresses: list[int] = []  # of what was reserved for the request at hand
        self.num_events = 0

    @property
    def reserved_bytes(self) -> int:
        return self.allocator.reserved_bytes

    def play(self, segments: Sequence[Action], action: Action | None) -> dict[str, int | None]:
        """Serve a request. Returns what can be compared: reserved bytes, and of an event allocated bytes and the
        address."""
        self.addresses = [each.address for each in segments if each.kind.sign > 0]
        is_given_back = any(each.kind.sign < 0 for each in segments)
        is_for_room = self.is_limited and action is not None and action.kind is Kind.ALLOC
        if is_given_back and not is_for_room:  # else it is the allocator's own doing
            self.allocator.empty_cache()
        found: dict[str, int | None] = {}
        if action is not None:
            found["address"] = self.recorded_address(self._serve(action))
            found["allocated"] = self.allocator.allocated_bytes
        return found | {"reserved": self.reserved_bytes}

    def _serve(self, action: Action) -> int:
        if action.kind is Kind.FREE_COMPLETED:
            _, address = block = self.living.pop(action.address)
            self.allocator.complete_free(block, action.stream)
            return address
        self.num_events += 1
        if action.kind is Kind.FREE_REQUESTED:
            _, address = block = self.living[action.address]
            self.allocator.request_free(block)
        else:
            _, address = block = self.allocator.malloc(action.num_bytes, action.stream)
            self.living[action.address] = block
        return address

    def next_address(self, num_bytes: int) -> int:
        """Of a new segment in the replay, whose allocator takes the lowest address among free blocks of equal size."""
        recorded = self.addresses.pop(0) if self.addresses else ELSEWHERE
        address = self.allocator.next_address(num_bytes) if self.is_by_age else recorded
        self.segments[address] = recorded
        return address

    def recorded_address(self, address: int) -> int:
        start = max(start for start in self.segments if start <= address)
        return address - start + self.segments[start]
