"""The way of control from the command line to the first step: which files it goes through, in order.

    scripts/python scripts/pages/hops.py            # a tiny Transformer
    scripts/python scripts/pages/hops.py model=resnet precision=bf16
    scripts/python scripts/pages/hops.py --all      # every call from file to file

Runs a point in this process and prints a line for each file of the package that control goes through before the first
`step`, with the function that is called there first, and by how many functions of other files it is entered.

What counts is what somebody must open who follows control. A call that comes back without having gone on to a third
file is no hop, nor is a value that checks its own fields (`__post_init__`), nor a library's function that compat/ hands
on: they are read where they are called, by their names. Nor is an event: from a point in a process of its own it goes
through a pipe to the parent. A function that calls the same file again and again sends its reader there once. `--all`
leaves out none of this: it counts every call from file to file. Calls while a module is imported, and those of
generated code, don't count in either.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = str(ROOT / "lowvram")
TINY = ("model.num_layers=1", "model.width=32", "model.num_heads=2", "data=synthetic", "data.sequence_length=16")
TINY += ("data.eval_samples=4", "train.batch_size=4", "train.steps=1", "logger=none", "device=cpu", "process=inline")
IGNORED = ("<module>", "<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")
NO_HOPS = ("__post_init__", "Events.__call__")


@dataclass(eq=False)
class Entry:
    """A call from one file of the package into another."""

    file: str
    name: str
    caller: str  # the function of the other file
    num_inside: int = 0  # entries of third files, from this call on
    leads_to_step: bool = False


class Hops:
    """All entries until the first step, in their order."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.functions: set[tuple[str, str]] = set()
        self.is_done = False
        self._by_frame: dict[FrameType, Entry] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or self.is_done or not code.co_filename.startswith(PACKAGE) or code.co_name in IGNORED:
            return
        around = list(frames_around(frame))
        if any(outer.f_code.co_name == "<module>" and is_ours(outer) for outer in around):
            return
        self.functions.add((code.co_filename, code.co_qualname))
        caller = next(filter(is_ours, around), None)
        if caller is None or caller.f_code.co_filename != code.co_filename:
            self._enter(frame, caller, around)
        if code.co_name == "step" and code.co_filename.endswith("core/step.py"):
            self.is_done = True
            sys.setprofile(None)
            for outer in (frame, *around):
                if outer in self._by_frame:
                    self._by_frame[outer].leads_to_step = True

    def _enter(self, frame: FrameType, caller: FrameType | None, around: list[FrameType]) -> None:
        path = str(Path(frame.f_code.co_filename).relative_to(PACKAGE))
        from_where = (
            "" if caller is None else caller.f_code.co_filename + caller.f_code.co_qualname.split(".<locals>")[0]
        )
        entry = self._by_frame[frame] = Entry(path, frame.f_code.co_qualname, from_where)
        self.entries.append(entry)
        outer = next((self._by_frame[each] for each in around if each in self._by_frame), None)
        is_no_hop = path.startswith("compat/") or any(map(is_check_or_event, (frame, *around)))
        if outer is not None and not is_no_hop:
            outer.num_inside += 1
        if is_no_hop:
            entry.num_inside = -1

    def of_control(self) -> list[Entry]:
        """Those that somebody must follow."""
        return [entry for entry in self.entries if entry.num_inside > 0 or entry.leads_to_step]


def frames_around(frame: FrameType) -> Iterable[FrameType]:
    """From the caller outwards."""
    before = frame.f_back
    while before is not None:
        yield before
        before = before.f_back


def is_check_or_event(frame: FrameType) -> bool:
    return frame.f_code.co_qualname.endswith(NO_HOPS)


def is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE)


def by_file(entries: Iterable[Entry]) -> Mapping[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.file, []).append(entry)
    return found


def times_entered(entries: Iterable[Entry]) -> int:
    """By how many functions of other files."""
    return len({entry.caller for entry in entries})


def followed(words: Iterable[str]) -> Hops:
    """A point with these words, until its first step."""
    sys.path.insert(0, str(ROOT))
    from lowvram.cli.main import main as command_line

    hops = Hops()
    with TemporaryDirectory() as folder:
        sys.argv = ["train.py", *TINY, f"hydra.run.dir={folder}/run", *words]
        sys.setprofile(hops)
        try:
            command_line()
        except SystemExit:
            pass
        finally:
            sys.setprofile(None)
    if not hops.is_done:
        sys.exit("no step was taken")
    return hops


def main() -> None:
    flags, words = ([word for word in sys.argv[1:] if word.startswith("--") == is_flag] for is_flag in (True, False))
    hops = followed(words)
    entries = hops.entries if "--all" in flags else hops.of_control()
    files = by_file(entries)
    for number, (file, found) in enumerate(files.items(), 1):
        times = len(found) if "--all" in flags else times_entered(found)
        print(f"{number:3}  {file:36} {found[0].name:40} entered {times}x")
    often = sum((len(found) if "--all" in flags else times_entered(found)) > 2 for found in files.values())
    print(f"{len(hops.functions)} functions; {len(files)} files, {often} of them entered more than twice")


if __name__ == "__main__":
    main()
