"""Trials of all kinds, as many as wanted: scripts/python -m tests.faults.campaign kills=2000 writes=1000 seed=0

kills=N writes=N flips=N configurations=N ranks=N hostile=N   how many trials of each kind
seed=N            what is drawn in them (0)
workers=N         processes that make trials (as many as there are cores)
only=NAME,NAME    of the programs of scenarios.py, with _ for each space
replay=KIND:N     that one trial alone, and keep its folder
out=FILE          a summary as JSON
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lowvram.launch.client import LIBRARIES
from tests.calls import ROOT
from tests.faults import shim

KINDS = ("kills", "writes", "flips", "configurations", "ranks", "hostile")
TELL_S = 30.0
MOST_DEATHS = 5  # of a worker and those in its place
OURS = ("LOWVRAM_", "HYDRA_", "PYTHON", "WANDB_", "OMP_")  # environment variables that a trial sets itself


@dataclass
class Wanted:
    """What was typed."""

    numbers: dict[str, int] = field(default_factory=dict)
    seed: int = 0
    only: tuple[str, ...] = ()
    workers: int = len(os.sched_getaffinity(0))
    replay: tuple[str, int] | None = None
    out: Path | None = None

    def jobs(self) -> list[tuple[str, int]]:
        """Kinds take turns, so that a campaign that is broken off has seen some of each."""
        if self.replay is not None:
            return [self.replay]
        most = max(self.numbers.values(), default=0)
        return [(kind, number) for number in range(most) for kind, last in self.numbers.items() if number < last]


def wanted(words: Sequence[str]) -> Wanted:
    """Of the command line."""
    found = Wanted()
    for word in words:
        key, _, value = word.partition("=")
        if key in KINDS:
            found.numbers[key] = int(value)
        elif key in ("seed", "workers"):
            setattr(found, key, int(value))
        elif key == "only":
            found.only = tuple(value.split(","))
        elif key == "replay":
            kind, _, number = value.partition(":")
            found.replay, found.workers = (kind, int(number)), 1
        elif key == "out":
            found.out = Path(value)
        else:
            sys.exit(f"{word}: no such word\n\n{__doc__}")
    return found


class Worker:
    """A warm process that makes trials, in `base`, beside the folders of other ones."""

    def __init__(self, base: Path) -> None:
        base.mkdir(parents=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        fixed = {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1", "HOME": str(base)}
        fixed |= LIBRARIES  # as in the fork server, which sets it too late for a fork of this
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.worker", str(base.parent / "labs" / base.name)],
            env={**kept, **fixed, **shim.environment(base)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._ready: str | None = None

    def make(self, kind: str, number: int, what: Wanted) -> dict[str, Any]:
        """One trial; if the worker dies, or has died, that is its problem."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        with contextlib.suppress(OSError):
            if self._ready is None:
                self._ready = self._process.stdout.readline()
            self._process.stdin.write(f"{kind} {number} {what.seed} {' '.join(what.only)}\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        problem = "the worker died" if self._ready else "the worker didn't start"
        return {"kind": kind, "number": number, "about": "", "problems": [problem], "cpu_s": 0.0, "died": True}

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


class Working(threading.Thread):
    """Hands trials to a worker, and starts a new one instead of one that died."""

    def __init__(self, base: Path, jobs: queue.SimpleQueue[tuple[str, int]], what: Wanted, told: Any) -> None:
        super().__init__(daemon=True)
        self._base, self._jobs, self._what, self._told = base, jobs, what, told
        self._workers, self._is_over = [Worker(base)], False
        self.start()

    def run(self) -> None:
        with contextlib.suppress(queue.Empty):
            while len(self._workers) <= MOST_DEATHS:
                one = self._workers[-1].make(*self._jobs.get_nowait(), self._what)
                self._told.put(one)
                if self._is_over:
                    break
                if "died" in one:
                    self._workers.append(Worker(self._base.with_name(f"{self._base.name}.{len(self._workers)}")))
        self._told.put(None)

    def stop(self) -> None:
        """End the worker, and start no other one."""
        self._is_over = True
        for worker in self._workers:
            worker.stop()


def campaign(what: Wanted) -> list[dict[str, Any]]:
    """All trials; those that were made if it is broken off."""
    room = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    base = Path(tempfile.mkdtemp(prefix="lowvram-faults-", dir=room))
    jobs: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    told: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    for job in what.jobs():
        jobs.put(job)
    workers = [Working(base / f"worker{index}", jobs, what, told) for index in range(what.workers)]
    found: list[dict[str, Any]] = []
    try:
        gather(len(workers), told, found, what)
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):  # another one would leave folders behind
            signal.signal(number, signal.SIG_IGN)
        print("stopped: what was made so far", flush=True)
    finally:
        for worker in workers:
            worker.stop()
        if what.replay is None:
            shutil.rmtree(base, ignore_errors=True)
        else:
            print(f"its folder: {base}/labs/worker0/trial")
    return found


def gather(num_running: int, told: Any, found: list[dict[str, Any]], what: Wanted) -> None:
    """What the workers tell, into `found`."""
    began = tell_at = time.monotonic()
    while num_running:
        one = told.get()
        if one is None:
            num_running -= 1
            continue
        found.append(one)
        if one["problems"] or what.replay:
            print(describe(one, what), flush=True)
        if time.monotonic() - tell_at > TELL_S:
            tell_at = time.monotonic()
            num_failed = sum(bool(each["problems"]) for each in found)
            print(f"{tell_at - began:.0f} s: {len(found)} trials, {num_failed} failed", flush=True)


def describe(one: dict[str, Any], what: Wanted) -> str:
    """A trial, and how to make it again."""
    problems = "".join(f"\n    {problem}" for problem in one["problems"])
    return f"{one['kind']}:{one['number']} {one['about']}{problems}\n  {replay(one, what)}"


def replay(one: dict[str, Any], what: Wanted) -> str:
    words = [
        "scripts/python",
        "-m",
        "tests.faults.campaign",
        f"replay={one['kind']}:{one['number']}",
        f"seed={what.seed}",
    ]
    words += [f"only={','.join(what.only)}"] if what.only else []
    return shlex.join(words)


def summary(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each kind: trials, failures, CPU seconds a trial."""
    table = {}
    for kind in KINDS:
        if rows := [one for one in found if one["kind"] == kind]:
            cpu_s = round(sum(one["cpu_s"] for one in rows) / len(rows), 2)
            table[kind] = {"trials": len(rows), "failed": sum(bool(one["problems"]) for one in rows), "cpu_s": cpu_s}
    return table


def figures(found: Sequence[dict[str, Any]], words: Sequence[str]) -> str:
    """The table of docs/reliability.md."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    cores = len(os.sched_getaffinity(0))
    where = f"commit {commit.strip()}, torch {torch.__version__}, {cores} cores"
    rows = [
        f"| {kind} | {row['trials']:,} | {row['failed']:,} | {row['cpu_s']:.2f} |"
        for kind, row in summary(found).items()
    ]
    head = ["| kind | trials | failed | CPU s each |", "|---|---:|---:|---:|"]
    return "\n".join([f"`{shlex.join(words)}`, {time.strftime('%Y-%m-%d')}, {where}.", "", *head, *rows])


def main(words: Sequence[str]) -> int:
    """Run the campaign that the words ask for."""
    what = wanted(words)
    if shim.compiler() is None:
        print("no C compiler (cc): the fault suite compiles its shim with it", file=sys.stderr)
        return 3
    print(f"seed={what.seed}", flush=True)
    found = campaign(what)
    print(figures(found, words))
    failed = [one for one in found if one["problems"]]
    for one in sorted(failed, key=lambda one: (one["kind"], one["number"])):
        print(replay(one, what))
    if what.out is not None:
        about = {"seed": what.seed, "date": time.strftime("%Y-%m-%d"), "kinds": summary(found), "failed": failed}
        about["trials"] = sorted(f"{one['kind']}:{one['number']} {one['about']}" for one in found)
        what.out.write_text(json.dumps(about, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
