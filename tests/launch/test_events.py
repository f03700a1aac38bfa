"""What a worker prints and says arrives once and whole, whatever else is written there."""

from __future__ import annotations

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
from lowvram.launch import events
from lowvram.launch.events import (
    BY_PIPE,
    EVENTS,
    FILE_NAME,
    LARGEST_EVENT_BYTES,
    Following,
    Lines,
    encoded,
    opened_anew,
    parsed,
)
from lowvram.launch.supervisor import Outlets
from lowvram.worker.main import Events, SpokenStream


def progress(step: int, **values: Any) -> dict[str, Any]:
    return {"event": "progress", "step": step, "values": values}


def followed(folder: Path, write: Callable[[Outlets], None], is_slow: bool = False) -> list[Any]:
    """The events of `write`, which runs in a thread meanwhile, or before anybody reads."""
    found: list[Any] = []
    printed_in, printed_out = os.pipe()
    writer, reader = opened_anew(folder)
    writing = threading.Thread(target=write, args=[Outlets(printed_out, writer)])
    with Following(found.append, Lines(printed_in), Lines(reader, is_file=True)) as following:
        writing.start()
        if is_slow:
            writing.join()
        while writing.is_alive():
            following.read()
        os.close(printed_out)
        os.close(writer)
        following.drain()
    writing.join()
    return found


def test_lines_are_found_wherever_they_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(0)
    wanted = [progress(step, text="x" * chance.choice([0, 1, 100, 4096, 9999])) for step in range(60)]
    stream = b"".join(b"\n" + encoded(event) + b"\n" for event in wanted)
    for size in (1, 7, 4096, 65536):
        monkeypatch.setattr(events, "READ_BYTES", size)
        assert followed(tmp_path, lambda outlets: events.write_all(outlets.events, stream), is_slow=True) == wanted


def test_ranks_and_loaders_write_at_the_same_time(tmp_path: Path) -> None:
    def write(outlets: Outlets) -> None:
        tell, stream = Events(outlets, 0), SpokenStream(outlets.printed)

        def speak(name: int) -> None:
            for step in range(100):
                tell("progress", step=step, values={"rank": name, "padding": "x" * 9999})
                stream.write(f"{name}.{step}\n") if not name else None

        threads = [threading.Thread(target=speak, args=[name]) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    found = followed(tmp_path, write)
    told = [(event["values"]["rank"], event["step"]) for event in found if event["event"] == "progress"]
    for name in range(4):
        assert [step for rank, step in told if rank == name] == list(range(100))
    assert [event["text"] for event in found if event["event"] == "say"] == [f"0.{step}" for step in range(100)]


def test_an_event_that_was_cut_off_costs_itself_alone(tmp_path: Path) -> None:
    """A rank was killed while it wrote; another one goes on."""
    line = b"\n" + encoded(progress(1, text="x" * 100))

    def write(outlets: Outlets) -> None:
        os.write(outlets.events, line[:50])
        Events(outlets, 0)("progress", step=2, values={})
        os.write(outlets.events, line[:60])

    torn, *others = followed(tmp_path, write)
    assert torn["text"].startswith("warning: an event of the point's process is left out: Unterminated string")
    assert others == [progress(2)]  # nobody says anything of the last one: how its process ended says more


@pytest.mark.parametrize(
    ("event", "what"),
    [
        ("[]", "it has no name"),
        ('{"event": 3}', "it has no name"),
        ('{"event": "x"}', "unknown event 'x'"),
        ('{"event": "ready"}', "ready has fields (here: ; wrong: )"),
        ('{"event": "ready", "fields": 3}', "ready has fields (here: fields; wrong: fields)"),
        ('{"event": "ready", "fields": {}, "more": 1}', "ready has fields (here: fields, more; wrong: more)"),
        ("{", "Expecting property name"),
    ],
)
def test_what_is_no_event_costs_itself_alone(tmp_path: Path, event: str, what: str) -> None:
    around = [progress(1), progress(2)]
    lines = [encoded(around[0]), event.encode(), encoded(around[1])]
    first, said, last = followed(tmp_path, lambda outlets: events.write_all(outlets.events, b"\n".join([*lines, b""])))
    assert [first, last] == around
    assert said["text"].startswith(f"warning: an event of the point's process is left out: {what}")


def test_a_report_arrives_that_the_disk_has_no_room_for(tmp_path: Path) -> None:
    """Whatever else is told is dropped then, and whoever tells it knows."""
    told: list[bool] = []

    def write(outlets: Outlets) -> None:
        full = os.open("/dev/full", os.O_WRONLY)
        tell = Events(Outlets(outlets.printed, full), 0)
        told.append(tell("metrics", step=1, values={}, is_late=False))
        tell("row", rank=0, fields={"status": "error"})
        os.close(full)

    assert followed(tmp_path, write) == [{"event": "row", "rank": 0, "fields": {"status": "error"}}]
    assert told == [False]


def test_a_pipe_of_somebody_else_is_no_file_of_events(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    with pytest.raises(OSError, match="it is a pipe, no regular file"):
        opened_anew(tmp_path)


def test_texts_that_are_too_long_are_cut() -> None:
    event = parsed(encoded({"event": "row", "rank": 0, "fields": {"status": "error"}, "trace": "x" * 2**23}))
    assert event["trace"] == "x" * LONGEST_TEXT + f"… ({2**23 - LONGEST_TEXT:,} characters more)"
    assert event["fields"] == {"status": "error"}
    with pytest.raises(ValueError, match="the event history would take"):
        encoded({"event": "history", "losses": ["x" * LONGEST_TEXT] * (LARGEST_EVENT_BYTES // LONGEST_TEXT + 1)})


def test_a_printed_line_is_cut(tmp_path: Path) -> None:
    """Also if it is written bit by bit; the line after it is whole."""

    def speak(outlets: Outlets) -> None:
        stream = SpokenStream(outlets.printed)
        for _ in range(100):
            stream.write("x" * 1000)
        stream.write("\nnext \udcff\n")
        stream.write("rest")
        stream.flush()
        stream.flush()
        os.write(outlets.printed, b"of other code \xff")

    found = followed(tmp_path, speak)
    cut = "x" * LONGEST_LINE + f"… ({100_000 - LONGEST_LINE:,} characters more)"
    assert [event["text"] for event in found] == [cut, "next \\udcff", "rest", "of other code \\xff"]


def test_who_tells_something_knows_whether_the_parent_is_there(tmp_path: Path) -> None:
    reader, printed = os.pipe()
    writer, file = opened_anew(tmp_path)
    first, second = (Events(Outlets(printed, writer), rank) for rank in range(2))
    assert first("metrics", step=1, values={}, is_late=False)
    os.close(reader)
    assert not first("metrics", step=2, values={}, is_late=False)
    assert second("metrics", step=2, values={}, is_late=False)  # only the first rank tells it
    assert not second("row", rank=1, fields={})
    SpokenStream(printed).write("to nobody\n")
    for fd in (printed, writer, file):
        os.close(fd)
    assert BY_PIPE not in (tmp_path / FILE_NAME).read_bytes()


def test_every_event_has_a_form() -> None:
    """Those that children tell, by their sources."""
    sources = Path(lowvram.__file__).parent
    files = [file for room in ("worker", "loops", "fidelity", "search") for file in (sources / room).rglob("*.py")]
    told = {name for file in files for name in re.findall(r'\b_?(?:events|tell)\(\s*"(\w+)"', file.read_text())}
    assert told <= EVENTS.keys()
    assert {"row", "begin", "metrics"} <= told
