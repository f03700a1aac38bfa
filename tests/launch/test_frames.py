"""Events in a pipe: every one arrives once and whole, whatever else is written there."""

from __future__ import annotations

import json
import os
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lowvram
from lowvram.config.texts import LONGEST_LINE, LONGEST_TEXT
from lowvram.launch.protocol import (
    BODY_BYTES,
    EVENTS,
    LARGEST_EVENT_BYTES,
    MAGIC,
    Assembly,
    EventReader,
    encoded,
    frames,
    parsed,
)
from lowvram.launch.supervisor import RanksCall, parsed_call
from lowvram.worker.main import Events, SpokenStream


def say(text: str) -> dict[str, Any]:
    return {"event": "say", "text": text}


def in_frames(*events: dict[str, Any]) -> list[bytes]:
    return [frame for number, event in enumerate(events) for frame in frames(encoded(event), 7, number)]


def read(data: bytes) -> list[Any]:
    """What comes out of a pipe that holds all of `data`."""
    reader, writer = os.pipe()
    return read_while(reader, lambda: write_all(writer, data))


def read_while(reader: int, write: Callable[[], None]) -> list[Any]:
    """What comes out of a pipe while `write` fills and closes it."""
    found: list[Any] = []
    writing = threading.Thread(target=write)
    writing.start()
    with os.fdopen(reader, "rb", buffering=0) as file:
        events = EventReader(file, found.append)
        while events.open_files():
            events.read()
        events.drain()
    writing.join()
    return found


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
    os.close(fd)


@pytest.mark.parametrize("seed", range(30))
def test_events_are_found_between_bytes_of_somebody_else(seed: int) -> None:
    """Also where these look like a frame, and wherever the pipe's reader happens to cut."""
    chance = random.Random(seed)
    texts = ["x" * chance.choice([0, 1, 100, BODY_BYTES, 3 * BODY_BYTES]) + str(index) for index in range(20)]
    foreign = [
        b"",
        b"hello\n",
        MAGIC,
        MAGIC[:3],
        MAGIC + bytes(40),
        in_frames(say("y"))[0][:-1],
        chance.randbytes(9999),
    ]
    stream = b"".join(chance.choice(foreign) + frame for frame in in_frames(*map(say, texts)))
    assembly, found, position = Assembly(), list[str](), 0
    while position < len(stream):
        size = chance.choice([1, 7, 4096, 65536])
        found += [json.loads(event)["text"] for event in assembly.feed(stream[position : position + size])]
        position += size
    assert found == texts
    num_ours = sum(map(len, in_frames(*map(say, texts))))
    assert assembly.num_foreign_bytes == len(stream) - num_ours


def test_frames_of_several_writers_are_reported_apart() -> None:
    """A loader's worker writes into the same pipe, and may be killed in the middle of an event."""
    ours = list(frames(encoded(say("a" * 3 * BODY_BYTES)), 1, 0))
    theirs = list(frames(encoded(say("b" * 3 * BODY_BYTES)), 2, 0))
    mixed = [frame for pair in zip(ours, [*theirs[:-1], b""], strict=True) for frame in pair]
    assert [event["text"][:2] for event in read(b"".join(mixed))] == ["aa"]


def test_a_frame_is_written_at_once() -> None:
    assert max(map(len, in_frames(say("x" * 10**6)))) == os.pathconf("/", "PC_PIPE_BUF")


def test_a_large_event_is_looked_at_once() -> None:
    """The time to read it is linear: no more than a frame is ever looked at again."""
    data = b"".join(frames(json.dumps(say("x" * 2**24)).encode(), 1, 1))
    assembly, found, most_left = Assembly(), list[bytes](), 0
    for start in range(0, len(data), 2**16):
        found += assembly.feed(data[start : start + 2**16])
        most_left = max(most_left, len(assembly._data))
    assert len(found) == 1
    assert most_left < os.pathconf("/", "PC_PIPE_BUF")


def test_foreign_bytes_are_reported_once_in_the_beginning_and_once_in_the_end() -> None:
    first, last = in_frames(say("first"), say("last"))
    texts = [event["text"] for event in read(b"oops\n" + first + b"more\n" * 9 + last)]
    assert texts[0] == "first"
    assert "last" in texts
    words = [text for text in texts if text.startswith("warning: ")]
    assert "bytes in the pipe of the point's process are no event, and left out: b'oops\\n" in words[0]
    assert sum(int(word.split()[1].replace(",", "")) for word in words) == 50
    assert len(words) <= 2


def test_a_child_that_was_killed_in_mid_event_costs_no_word() -> None:
    whole, *torn = in_frames(say("whole"), say("x" * 2 * BODY_BYTES))
    assert [event["text"] for event in read(whole + torn[0])] == ["whole"]


@pytest.mark.parametrize(
    ("event", "what"),
    [
        ("[]", "it has no name"),
        ('{"event": 3}', "it has no name"),
        ('{"event": "x"}', "there is none of the name 'x'"),
        ('{"event": "say"}', "say has text (here: ; wrong: )"),
        ('{"event": "say", "text": 3}', "say has text (here: text; wrong: text)"),
        ('{"event": "say", "text": "", "more": 1}', "say has text (here: text, more; wrong: more)"),
        ("{", "Expecting property name"),
    ],
)
def test_what_is_no_event_costs_itself_alone(event: str, what: str) -> None:
    before, after = (frame for frame in in_frames(say("before"), say("after")))
    said = [found["text"] for found in read(before + b"".join(frames(event.encode(), 7, 9)) + after)]
    assert (said[0], said[2:]) == ("before", ["after"])
    assert said[1].startswith(f"warning: an event of the point's process is left out: {what}")


def test_texts_that_are_too_long_are_cut() -> None:
    event = parsed(encoded({"event": "row", "rank": 0, "fields": {"status": "error"}, "trace": "x" * 2**23}))
    assert event["trace"] == "x" * LONGEST_TEXT + f"… ({2**23 - LONGEST_TEXT:,} characters more)"
    assert event["fields"] == {"status": "error"}
    with pytest.raises(ValueError, match="the event history would take"):
        encoded({"event": "history", "losses": ["x" * LONGEST_TEXT] * (LARGEST_EVENT_BYTES // LONGEST_TEXT + 1)})


def test_a_printed_line_is_cut() -> None:
    """Also if it is written bit by bit; the line after it is whole."""
    reader, writer = os.pipe()
    stream = SpokenStream(Events(writer, 0))

    def speak() -> None:
        for _ in range(100):
            stream.write("x" * 1000)
        stream.write("\nnext \udcff\n")
        stream.write("rest")
        stream.flush()
        stream.flush()
        os.close(writer)

    found = read_while(reader, speak)
    cut = "x" * LONGEST_LINE + f"… ({100_000 - LONGEST_LINE:,} characters more)"
    assert [event["text"] for event in found] == [cut, "next \udcff", "rest"]


def test_who_tells_something_knows_whether_the_parent_is_there() -> None:
    reader, writer = os.pipe()
    first, second = Events(writer, 0), Events(writer, 1)
    assert first("metrics", step=1, values={}, is_late=False)
    os.close(reader)
    assert not first("metrics", step=2, values={}, is_late=False)
    assert second("metrics", step=2, values={}, is_late=False)  # only the first rank tells it
    assert not second("say", text="")
    os.close(writer)


def test_every_event_has_a_form() -> None:
    """Those that children tell, by their sources."""
    sources = Path(lowvram.__file__).parent
    files = [file for room in ("worker", "loops", "fidelity", "search") for file in (sources / room).rglob("*.py")]
    told = {name for file in files for name in re.findall(r'\b_?(?:events|tell)\(\s*"(\w+)"', file.read_text())}
    assert told <= EVENTS.keys()
    assert {"row", "begin", "metrics"} <= told


def test_junk_is_no_call_for_more_ranks() -> None:
    """Code of the user's may have written it: the fork server goes on."""
    sound = b'{"num_ranks": 2, "timeout_s": 4.5, "port": 7}'
    assert parsed_call(sound) == RanksCall(2, 7, 4.5)
    others = (
        b"",
        b"junk{",
        b"[1]",
        b"3",
        b"\xff",
        b'{"num_ranks": 2}',
        sound.replace(b"2", b'"2"'),
        sound.replace(b"2", b"0"),
    )
    for message in others:
        assert parsed_call(message) is None
