"""What a worker says of its run, one JSON object a line. Imports no torch.

A run's events are in its folder's `events.jsonl`, which anybody may follow. All ranks append to it, each event with one
call, between two line breaks: of a process that is killed while it writes, that event alone is lost. What a worker
prints goes through a pipe instead, as text.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, final

from lowvram.config.texts import LONGEST_LINE, with_short_texts
from lowvram.results.files.regular import check_regular

FILE_NAME = "events.jsonl"
LARGEST_EVENT_BYTES = 2**26
READ_BYTES = 2**16
FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
BY_PIPE = b"\x1e"  # begins an event among printed lines: a report that couldn't be written into the file
Event = dict[str, Any]
Fields = Mapping[str, type | UnionType]
Listener = Callable[[Event], None]

NUMBER = int | float
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
    "rehearsal": {"parts": int, "more_parts": int | None},
    "row": {"rank": int, "fields": dict},
    "searched": {"num_plans": int},
    "snapshot": {"step": int, "path": str},
}
OPTIONAL: Mapping[str, Fields] = {"row": {"is_of_a_peer": bool, "trace": str}}


def encoded(event: Event) -> bytes:
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
        raise ValueError(f"unknown event {name!r}")
    required, given = EVENTS[name], {key: value for key, value in event.items() if key != "event"}
    known = {**required, **OPTIONAL.get(name, {})}
    wrong = [key for key, value in given.items() if key not in known or not isinstance(value, known[key])]
    if wrong or not required.keys() <= given.keys():
        raise ValueError(f"{name} has {', '.join(required)} (here: {', '.join(given)}; wrong: {', '.join(wrong)})")
    return event


def opened_anew(folder: Path) -> tuple[int, int]:
    """Descriptors of the folder's file, emptied: for those who write it, and for who reads it.

    Raises:
        OSError: it can't be written, or is somebody else's pipe or link.
    """
    writer = opened(folder, os.O_TRUNC)
    try:
        return writer, os.open(folder / FILE_NAME, os.O_RDONLY | FLAGS)
    except OSError:
        os.close(writer)
        raise


def opened(folder: Path, more: int = 0) -> int:
    """A descriptor of the folder's file, for one who writes it.

    Args:
        more: further flags of `os.open`.

    Raises:
        OSError: it can't be written, or is somebody else's pipe or link.
    """
    path = folder / FILE_NAME
    if os.path.lexists(path):
        check_regular(path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | FLAGS | more, 0o644)


def write_all(fd: int, data: bytes) -> None:
    """Write to a file, or to a pipe that may take only a part at a time."""
    while data:
        data = data[os.write(fd, data) :]


def is_heard(pipe: int) -> bool:
    """Whether somebody still reads what is written into a pipe."""
    poll = select.poll()
    poll.register(pipe, 0)
    return not any(flags & select.POLLERR for _, flags in poll.poll(0))


@final
class Lines:
    """The lines of a file or pipe that is read while others write it. Closes the descriptor.

    Args:
        is_file: whether more may come after its end.
    """

    def __init__(self, fd: int, is_file: bool = False) -> None:
        self.fd, self.is_file = fd, is_file
        self._pieces = list[bytes]()  # of the line that has no end yet
        self.is_over = False  # whether nothing more can come
        os.set_blocking(fd, False)

    def read(self) -> Iterator[bytes]:
        """The lines that end in what is there now, up to `READ_BYTES` of it."""
        try:
            data = b"" if self.is_over else os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return
        self.is_over = not data and not self.is_file
        *ends, rest = data.split(b"\n")
        for end in ends:
            yield b"".join((*self._pieces, end))
            self._pieces = []
        self._pieces.append(rest)

    def drain(self) -> Iterator[bytes]:
        """The lines that are left, when nobody writes any more."""
        while self._has_more():
            yield from self.read()

    def _has_more(self) -> bool:
        if self.is_file:
            return os.fstat(self.fd).st_size > os.lseek(self.fd, 0, os.SEEK_CUR)
        return not self.is_over and bool(select.select([self.fd], [], [], 0)[0])

    @property
    def rest(self) -> bytes:
        """What has no line break at its end yet."""
        return b"".join(self._pieces)

    def close(self) -> None:
        os.close(self.fd)


@final
class Following:
    """Passes on to `on_event` what a worker prints, as events "say", and the events that it writes.

    Args:
        speech: reads the pipe into which the worker prints.
        events: reads what it writes its events into.
    """

    def __init__(self, on_event: Listener, speech: Lines, events: Lines) -> None:
        self._on_event, self._speech, self._events = on_event, speech, events
        self._num_left_out = 0  # lines that are no events

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *_: object) -> None:
        self._speech.close()
        self._events.close()

    def pipes(self) -> list[int]:
        """The descriptors that become readable when there is more. A file always is."""
        return [lines.fd for lines in (self._speech, self._events) if not lines.is_over and not lines.is_file]

    def read(self) -> None:
        """Pass on what is there now."""
        self._pass_on(self._speech.read(), self._events.read())

    def drain(self) -> None:
        """Pass on all that is left, when the processes have ended."""
        self._pass_on(self._speech.drain(), self._events.drain())
        if rest := self._speech.rest:
            self._say(rest.decode(errors="backslashreplace"))
        if self._num_left_out > 1:
            self._say(f"warning: {self._num_left_out - 1:,} more lines of {FILE_NAME} are no events, and left out")

    def _pass_on(self, printed: Iterable[bytes], events: Iterable[bytes]) -> None:
        for line in printed:
            if line.startswith(BY_PIPE):
                self._tell(line.removeprefix(BY_PIPE))
            else:
                self._say(line.decode(errors="backslashreplace"))
        for line in filter(None, events):
            self._tell(line)

    def _tell(self, line: bytes) -> None:
        try:
            event = parsed(line)
        except ValueError as error:
            self._num_left_out += 1
            if self._num_left_out == 1:
                self._say(f"warning: an event of the point's process is left out: {error}")
            return
        self._on_event(event)

    def _say(self, text: str) -> None:
        self._on_event({"event": "say", "text": text})
