"""The events that a child sends to its parent, and how they are sent through a pipe. Imports no torch.

An event is JSON in ASCII, cut into frames of at most PIPE_BUF bytes. The kernel writes such a frame as a whole or not
at all, and never mixes two of them. So several processes and threads may write at the same time, and any of them may be
killed. A frame's header has MAGIC, the id of the process that wrote it, the number of the event, whether the frame is
the event's last one, and the length of the body; then follow a CRC-32 of header and body, and the body.
"""

from __future__ import annotations

import json
import os
import select
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import UnionType
from typing import Any, final

from lowvram.config.texts import LONGEST_LINE, with_short_texts

MAGIC = b"\xfe\xff\xfd\xfc"  # occurs in no ASCII or UTF-8 text
HEADER = struct.Struct(">4sII?H")  # magic, pid, number, is_last, length
CHECKSUM = struct.Struct(">I")
OVERHEAD_BYTES = HEADER.size + CHECKSUM.size
BODY_BYTES = select.PIPE_BUF - OVERHEAD_BYTES
LARGEST_EVENT_BYTES = 2**26
SAMPLE_BYTES = 60  # of foreign bytes, shown in the warning
Event = dict[str, Any]
Fields = Mapping[str, type | UnionType]
Listener = Callable[[Event], None]

NUMBER = int | float
READ_BYTES = 2**16
EVENTS: Mapping[str, Fields] = {
    "begin": {
        "step": int,
        "num_steps": int,
        "setup_s": NUMBER,
        "parts": int,
        "more_parts": int | None,
        "pid": int,
        "untold": list,
    },
    "compared": {"gradient_error": NUMBER | None, "gradient_cosine": NUMBER | None},
    "found": {"ranking": list, "account": list, "refusal": str | None},
    "history": {"losses": list},
    "memory_over_step": {"kinds": list, "moments": list},
    "metrics": {"step": int, "values": dict, "is_late": bool},
    "planned": {"index": int, "fields": dict},
    "progress": {"step": int, "values": dict},
    "ready": {"fields": dict},
    "row": {"rank": int, "fields": dict},
    "say": {"text": str},
    "searched": {"num_plans": int},
    "snapshot": {"step": int, "path": str},
}
OPTIONAL: Mapping[str, Fields] = {"row": {"is_of_a_peer": bool, "trace": str}}


def encoded(event: dict[str, Any]) -> bytes:
    """An event as JSON. If it is too long, its long texts are cut, with a note.

    Raises:
        ValueError: it is too large all the same.
    """
    data = json.dumps(event).encode("ascii")
    if len(data) > LONGEST_LINE:
        data = json.dumps(with_short_texts(event)).encode("ascii")
    if len(data) > LARGEST_EVENT_BYTES:
        raise ValueError(f"the event {event['event']} would take {len(data):,} bytes: at most {LARGEST_EVENT_BYTES:,}")
    return data


def frames(data: bytes, pid: int, number: int) -> Iterator[bytes]:
    """The frames of an event, each to be written with one call.

    Args:
        pid, number: of the process that writes it, and of the event in that process.
    """
    for start in range(0, len(data), BODY_BYTES):
        body, is_last = data[start : start + BODY_BYTES], start + BODY_BYTES >= len(data)
        header = HEADER.pack(MAGIC, pid, number, is_last, len(body))
        yield header + CHECKSUM.pack(zlib.crc32(body, zlib.crc32(header))) + body


@final
class Assembly:
    """Puts events together from the bytes of a pipe, in linear time. Foreign bytes, which belong to no frame, are
    counted and dropped."""

    def __init__(self) -> None:
        self.num_foreign_bytes = 0
        self.sample = b""  # the first foreign bytes
        self._data = bytearray()  # not parsed yet
        self._begun: dict[tuple[int, int], bytearray] = {}  # incomplete events, by process and number

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The events that end in `data`."""
        self._data += data
        while self._skip_to_frame():
            _, pid, number, is_last, length = HEADER.unpack_from(self._data)
            if len(self._data) < OVERHEAD_BYTES + length:
                return
            (checksum,) = CHECKSUM.unpack_from(self._data, HEADER.size)
            body = bytes(self._data[OVERHEAD_BYTES : OVERHEAD_BYTES + length])
            if zlib.crc32(body, zlib.crc32(self._data[: HEADER.size])) != checksum:
                self._drop(1)  # the next one may begin anywhere
                continue
            del self._data[: OVERHEAD_BYTES + length]
            whole = self._begun.setdefault((pid, number), bytearray())
            whole += body
            if is_last:
                yield bytes(self._begun.pop((pid, number)))

    def end(self) -> None:
        """Call it when nothing more comes: the bytes that are left are foreign."""
        self._drop(len(self._data))

    def _skip_to_frame(self) -> bool:
        """Drop what is before the next header; False if there is no complete header yet."""
        start = self._data.find(MAGIC)
        if start < 0:
            start = len(self._data) - next(n for n in (3, 2, 1, 0) if self._data.endswith(MAGIC[:n]))
        self._drop(start)
        return len(self._data) >= OVERHEAD_BYTES

    def _drop(self, num_bytes: int) -> None:
        if len(self.sample) < SAMPLE_BYTES:
            self.sample += bytes(self._data[: min(num_bytes, SAMPLE_BYTES - len(self.sample))])
        self.num_foreign_bytes += num_bytes
        del self._data[:num_bytes]


def parsed(data: bytes) -> Event:
    """An event, checked against `EVENTS`.

    Raises:
        ValueError: it is malformed; the message says how.
    """
    event = json.loads(data)
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise ValueError("it has no name")
    name = event["event"]
    if name not in EVENTS:
        raise ValueError(f"there is none of the name {name!r}")
    required, given = EVENTS[name], {key: value for key, value in event.items() if key != "event"}
    known = {**required, **OPTIONAL.get(name, {})}
    wrong = [key for key, value in given.items() if key not in known or not isinstance(value, known[key])]
    if wrong or not required.keys() <= given.keys():
        raise ValueError(f"{name} has {', '.join(required)} (here: {', '.join(given)}; wrong: {', '.join(wrong)})")
    return event


class EventReaders:
    """The pipes of all ranks of a point."""

    def __init__(self, on_event: Listener) -> None:
        self._on_event = on_event
        self._readers: list[EventReader] = []
        self._files = ExitStack()

    def __enter__(self) -> EventReaders:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def add(self, fd: int) -> None:
        file = self._files.enter_context(os.fdopen(fd, "rb", buffering=0))
        self._readers.append(EventReader(file, self._on_event))

    def open_files(self) -> list[Any]:
        return [file for reader in self._readers for file in reader.open_files()]

    def read(self) -> None:
        """Pass on what is there now."""
        for reader in self._readers:
            reader.read()

    def drain(self) -> None:
        """Pass on all that is left. Call it when the children have ended, else it may not return."""
        for reader in self._readers:
            reader.drain()


@final
class EventReader:
    """Reads the events of one rank's pipe. Warns of foreign bytes when it sees the first ones, and again at the end if
    there were more."""

    def __init__(self, file: Any, on_event: Listener) -> None:
        self._file, self._on_event = file, on_event
        self._assembly, self._at_end = Assembly(), False
        self._num_warned_bytes = 0  # foreign bytes that a warning has counted

    def open_files(self) -> list[Any]:
        return [] if self._at_end else [self._file]

    def read(self) -> None:
        """Pass on what is there now."""
        if self._at_end or not select.select([self._file], [], [], 0)[0]:
            return
        data = self._file.read(READ_BYTES)
        self._at_end = not data
        for whole in self._assembly.feed(data):
            self._pass_on(whole)
        if not self._num_warned_bytes:
            self._warn_of_foreign()

    def drain(self) -> None:
        """Pass on all that is left."""
        while not self._at_end and select.select([self._file], [], [], 0)[0]:
            self.read()
        self._assembly.end()
        self._warn_of_foreign()

    def _pass_on(self, data: bytes) -> None:
        try:
            event = parsed(data)
        except ValueError as error:
            self._say(f"an event of the point's process is left out: {error}")
            return
        self._on_event(event)

    def _warn_of_foreign(self) -> None:
        num_bytes = self._assembly.num_foreign_bytes - self._num_warned_bytes
        if num_bytes:
            sample = f"{self._assembly.sample!r}" if not self._num_warned_bytes else "as before"
            self._say(f"{num_bytes:,} bytes in the pipe of the point's process are no event, and left out: {sample}")
        self._num_warned_bytes += num_bytes

    def _say(self, text: str) -> None:
        self._on_event({"event": "say", "text": f"warning: {text}"})
