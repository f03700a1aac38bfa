"""Events as bytes in a pipe, and how their reader finds them again behind bytes of somebody else. Imports no torch.

An event is JSON in ASCII, cut into frames of at most PIPE_BUF bytes. The kernel writes such a frame whole or not at
all, and never mixes two of them, so that threads and loader's workers may write at the same time and any of them may
be killed. Its header has MAGIC, who wrote it, the number of the event, whether the frame is its last one, the length of
what follows and a CRC-32 of all that.
"""

from __future__ import annotations

import json
import select
import struct
import zlib
from collections.abc import Iterator
from typing import Any, final

from lowvram.config.texts import LONGEST_LINE, with_short_texts

MAGIC = b"\xfe\xff\xfd\xfc"  # no text in ASCII or UTF-8 holds it
HEADER = struct.Struct(">4sII?H")  # magic, pid, number, is_last, length
CHECKSUM = struct.Struct(">I")
OVERHEAD_BYTES = HEADER.size + CHECKSUM.size
BODY_BYTES = select.PIPE_BUF - OVERHEAD_BYTES
LARGEST_EVENT_BYTES = 2**26
SAMPLE_BYTES = 60  # of foreign bytes, for the user


def encoded(event: dict[str, Any]) -> bytes:
    """An event as JSON. Texts that are far too long for it are cut, and say so.

    Raises:
        ValueError: it is too large even so.
    """
    data = json.dumps(event).encode("ascii")
    if len(data) > LONGEST_LINE:
        data = json.dumps(with_short_texts(event)).encode("ascii")
    if len(data) > LARGEST_EVENT_BYTES:
        raise ValueError(f"the event {event['event']} would take {len(data):,} bytes: at most {LARGEST_EVENT_BYTES:,}")
    return data


def frames(data: bytes, pid: int, number: int) -> Iterator[bytes]:
    """The pieces of an event, each to be written at once."""
    for start in range(0, len(data), BODY_BYTES):
        body, is_last = data[start : start + BODY_BYTES], start + BODY_BYTES >= len(data)
        header = HEADER.pack(MAGIC, pid, number, is_last, len(body))
        yield header + CHECKSUM.pack(zlib.crc32(body, zlib.crc32(header))) + body


@final
class Assembly:
    """Makes events of what comes out of a pipe, in time that is linear in its size."""

    def __init__(self) -> None:
        self.num_foreign_bytes = 0
        self.sample = b""  # the first of them
        self._data = bytearray()  # that is not looked at yet
        self._begun: dict[tuple[int, int], bytearray] = {}  # events of which more frames are to come

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
        """Nothing more comes: what is left is no frame."""
        self._drop(len(self._data))

    def _skip_to_frame(self) -> bool:
        """Drop what is in front of the next header; False until that is there."""
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
