"""Faults on demand, inside the children of the fork server. The point's name says which, and before which step:

name=kill@3              the child ends as after `kill -9` instead of making step 3
name=hang@0              it hangs while it is set up
name=1.raise+2.segfault  in a sweep over seed: before step 2, the point with seed=1 raises, that with seed=2 crashes
name=kill@3.1            of several ranks only the second one ends so

name=Forgetful           every accumulation divides by half of its targets

A run's name changes no result and no identity, so such a point is the same point as without the fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMPILED = "Compiled"  # no fault is written so
FORGETFUL = "Forgetful"  # nor so: accumulation counts half of its targets, so that gradients are twice as large
LARGEST_DISK_BYTES = 2**23  # of any test


def fault_raise(folder: Path) -> None:
    raise ValueError("the model is broken")


def fault_sys_exit(folder: Path) -> None:
    sys.exit(5)


def fault_segfault(folder: Path) -> None:
    ctypes.string_at(0)


def fault_exit17(folder: Path) -> None:
    os._exit(17)


def fault_kill(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fault_term(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fault_hang(folder: Path) -> None:
    time.sleep(1000)


def fault_spin(folder: Path) -> None:
    while True:
        pass


def fault_out_of_memory(folder: Path) -> None:
    bytearray(2**60)


def fault_stop_and_out_of_memory(folder: Path) -> None:
    """The program is asked to stop, and the point runs out of memory before it hears of it."""
    server = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    os.kill(int(server[1]), signal.SIGINT)
    fault_out_of_memory(folder)


def fault_stop(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fault_bad_alloc(folder: Path) -> None:
    ctypes.CDLL("libstdc++.so.6")._ZSt17__throw_bad_allocv()


def fault_kill_worker(folder: Path) -> None:
    """Of the loader."""
    workers = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    os.kill(int(workers[0]), signal.SIGKILL)


def fault_kill_server(folder: Path) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def fault_fill_disk(folder: Path) -> None:
    """To the last byte, of a small one."""
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(2**16)):
            assert file.tell() < LARGEST_DISK_BYTES


def fault_remove_folder(folder: Path) -> None:
    """As somebody who tidies up, at once as far as others see."""
    shutil.rmtree(folder.rename(folder.with_name("removed")))


def fault_silent_message(folder: Path) -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    raise Broken


def fault_native_noise(folder: Path) -> None:
    """Of a library, without end."""
    os.write(2, b"begin\n" + b"." * 2**22 + b"\nend\n")


def fault_slow(folder: Path) -> None:
    """Each step from there on."""
    time.sleep(0.2)


def fault_uncap(folder: Path) -> None:
    """Nothing enforces `vram` any more."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def fault_stall(folder: Path) -> None:
    """One step."""
    time.sleep(0.5)


def fault_long_line(folder: Path) -> None:
    print("x" * 2**23)


def fault_strange_line(folder: Path) -> None:
    """No UTF-8, and then what isn't in every encoding."""
    print("strange \udcff \u20ac")


def fault_long_message(folder: Path) -> None:
    raise ValueError("x" * 2**23)


def fault_foreign_bytes(folder: Path) -> None:
    """As code in C that writes into whatever descriptor has a number."""
    for fd in outlets(folder):
        os.write(fd, b"hello from C\n" * 1000)


def fault_unknown_events(folder: Path) -> None:
    """Whole, but none of ours."""
    for event in ({"event": "x"}, {"event": "ready", "words": 1}, {"event": "ready", "fields": None}):
        for fd in outlets(folder):
            os.write(fd, json.dumps(event).encode() + b"\n")


def outlets(folder: Path) -> list[int]:
    """Where what this process says goes: the pipes that it may write to, but its own streams, and the run's file."""
    found = {int(path.name): os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()}
    ours = [fd for fd, path in found.items() if "/pipe:" in path or Path(path).name == "events.jsonl"]
    return [fd for fd in ours if fd > 2 and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY]


def due(name: str | None, seed: int, step: int, rank: int) -> Callable[[Path], None] | None:
    """The fault of a rank before `step`, if the point's name asks for one."""
    for word in (name or "").split("+"):
        match = re.fullmatch(r"(?:(\d+)\.)?([a-z_]+\d*)(?:@(\d+)(?:\.(\d+))?)?", word)
        if match and int(match[1] or seed) == seed and int(match[4] or rank) == rank:
            first = int(match[3] or 2)
            if step == first or (match[2] == "slow" and step > first):
                return globals()[f"fault_{match[2]}"]
    return None


def arm() -> None:
    """Look for a fault in the set-up and before every step of every child. Updates of few bits are not compiled, as in
    the tests themselves (tests/conftest.py), but in a run with the name `COMPILED`."""
    from lowvram.knobs.optimizer import low_bit
    from lowvram.loops.session import Session
    from lowvram.worker import job

    named, updated, steps, compiled_step = job.named_knobs, Session.update, [0], low_bit.compiled_step

    @functools.wraps(named)
    def named_knobs(settings: Any, *args: Any) -> Any:
        act(settings.root, 0, Path())
        low_bit.compiled_step = compiled_step if settings.root.name == COMPILED else eager(compiled_step)
        is_forgetful = settings.root.name == FORGETFUL and settings.groups["accum"].parts > 1
        choices, knobs = named(settings, *args)
        return choices, knobs | ({"forgetful": forgetful()} if is_forgetful else {})

    @functools.wraps(updated)
    def update(session: Session, *args: Any) -> Any:
        steps[0] += 1
        act(session.settings.root, steps[0], session.folder)
        return updated(session, *args)

    job.named_knobs = named_knobs
    Session.update = update  # pyright: ignore[reportAttributeAccessIssue]


def forgetful() -> Any:
    """A well-known bug, as a knob."""
    from dataclasses import replace

    from lowvram.core.knob import Knob, Stage

    class Halved(Knob):
        stage = Stage.SHARD

        def apply(self, rig: Any) -> Any:
            return replace(rig, total=lambda parts: rig.total(parts) / 2)

    return Halved()


def eager(compiled_step: Callable[[Any], None]) -> Callable[[Any], None]:
    """The same without its compiler."""

    def step(optimizer: Any) -> None:
        import torch

        with torch.compiler.set_stance("force_eager"):
            compiled_step(optimizer)

    return step


def act(root: Any, step: int, folder: Path) -> None:
    from lowvram.core.mesh import data_ranks

    if fault := due(root.name, root.seed, step, data_ranks().rank):
        fault(folder)
