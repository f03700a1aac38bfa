"""Where trials run: folders, warm programs, and what undisturbed ones leave."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from tests.faults import warm
from tests.faults.foreign import AROUND, WITHIN, Foreign
from tests.faults.results import Results, results, without_choice
from tests.faults.scenarios import Scenario
from tests.faults.shim import Page, Role

CODES = {0, 1, 3, 75}  # docs/command_line.md
LONGEST_S = 90.0  # of a program
ROUND = 20  # to which calls are counted, as a few more or less would make a replay another trial
GONE_S = 20.0  # until the last process of a program has ended: the server's grace and more
TRACEBACK = re.compile(r"Traceback \(most recent call last\)|^\w*Error: |Fatal Python error", re.MULTILINE)


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    code: int | None  # None: it had to be killed
    said: str
    problems: list[str]


@dataclass
class Trial:
    """A folder in which programs run, among foreign files."""

    folder: Path
    foreign: Foreign
    scenario: Scenario

    @property
    def work(self) -> Path:
        """Where the programs are started."""
        return self.folder / "work"

    @property
    def runs(self) -> list[Path]:
        """Folders of runs, so far."""
        return [path.parent for path in self.work.glob("**/.lowvram")]

    def clear(self, run: Path) -> None:
        """Its user moves a run that can't go on out of the way, with the files that were put among its own."""
        for name in ("snapshots", "model", ".hydra"):
            self.foreign.forget(run / name)
            shutil.rmtree(run / name, ignore_errors=True)
        for path in run.iterdir():
            if path not in self.foreign.paths and not path.is_dir():
                path.unlink()

    def results(self) -> Results:
        found = results(self.work, self.foreign.paths)
        return without_choice(found) if self.scenario.is_timed else found

    def held(self) -> list[str]:
        """Locks that somebody holds still."""
        return [f"the lock of {run.relative_to(self.work)} is held" for run in self.runs if is_held(run / ".lowvram")]


def is_held(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@final
class Lab:
    """For one warm process: `base` is its own folder, and `shared` that of all processes of the campaign."""

    def __init__(self, base: Path, shared: Path, page: Page) -> None:
        self.base, self.shared, self.page = base, shared, page
        self.environment = {"LOWVRAM_CACHE": str(shared / "cache"), "COLUMNS": "200"}
        self._undisturbed: dict[str, tuple[Results, int, float]] = {}
        self.said: dict[str, str] = {}  # by undisturbed programs
        base.mkdir(parents=True, exist_ok=True)

    def trial(self, scenario: Scenario, is_planted: bool) -> Trial:
        """A new folder with what the scenario needs before, and foreign files also in the folder of its run."""
        folder = self.base / "trial"
        shutil.rmtree(folder, ignore_errors=True)
        trial = Trial(folder, Foreign(folder), scenario)
        trial.work.mkdir(parents=True)
        elsewhere = folder / "elsewhere"
        elsewhere.mkdir()
        if scenario.before is not None:
            shutil.copytree(self.prepared(scenario), trial.work, dirs_exist_ok=True, symlinks=True)
        trial.foreign.plant(folder, ("elsewhere/precious.bin",))
        trial.foreign.plant(trial.work, AROUND, out=elsewhere)
        if is_planted:
            trial.foreign.plant(trial.work / scenario.folder, WITHIN, out=elsewhere)
        return trial

    def prepared(self, scenario: Scenario) -> Path:
        """What a scenario finds: the folder of an earlier program, made once."""
        assert scenario.before is not None
        folder = self.shared / "before" / scenario.name
        if not folder.exists():
            beside = self.base / "before"
            beside.mkdir()
            ended = self.run(scenario.before, beside)
            assert ended.code == 0, ended
            folder.parent.mkdir(exist_ok=True)
            with contextlib.suppress(OSError):  # another process was faster
                beside.rename(folder)
            shutil.rmtree(beside, ignore_errors=True)
        return folder

    def undisturbed(self, scenario: Scenario) -> tuple[Results, int, float]:
        """What the scenario leaves, how many calls of its (the shim's) change files, and how long it takes in s."""
        if scenario.name not in self._undisturbed:
            kept = self.shared / f"{scenario.name}.json"
            if not kept.exists():
                self._run_undisturbed(scenario)  # fills the cache of plans, which changes what calls there are
                beside = self.base / "undisturbed.json"
                beside.write_text(json.dumps(self._run_undisturbed(scenario)))
                beside.rename(kept)
            self._undisturbed[scenario.name] = tuple(json.loads(kept.read_text()))
        return self._undisturbed[scenario.name]

    def _run_undisturbed(self, scenario: Scenario) -> tuple[Results, int, float]:
        trial, began = self.trial(scenario, is_planted=False), time.monotonic()
        ended = self.run(scenario.words, trial.work, lambda page: page.begin(trial.work))
        assert ended.code == 0, (scenario.name, ended)
        num_calls = -(-self.page.count // ROUND) * ROUND
        return trial.results(), num_calls, time.monotonic() - began

    def run(
        self,
        words: Sequence[str],
        work: Path,
        arm: Callable[[Page], object] = lambda page: page.rest(),
        kill_after_s: float | None = None,
        victims: tuple[Role, ...] = (),
        environment: dict[str, str] | None = None,
    ) -> Ended:
        """A program from its start until the last of its processes has ended."""
        out = self.base / "out"
        out.write_bytes(b"")
        arm(self.page)
        program = warm.begin(words, work, out, self.page, {**self.environment, **(environment or {})})
        problems = []
        while program.poll() is None:
            passed_s = time.monotonic() - program.began
            if kill_after_s is not None and passed_s >= kill_after_s:
                kill_after_s = None
                self.kill(victims)
            if passed_s > LONGEST_S:
                problems.append(f"the program still ran after {LONGEST_S} s")
                program.kill()
            time.sleep(0.003)
        deadline = time.monotonic() + GONE_S
        while left := program.members():
            if time.monotonic() > deadline:
                problems.append(f"{len(left)} processes were left {GONE_S} s after the end")
                program.kill()
            time.sleep(0.02)
        self.page.rest()  # the suite itself works there too
        reap()
        said = program.said()
        if TRACEBACK.search(said):
            problems.append(f"a traceback: {tail(said)}")
        if program.code is not None and program.code >= 0 and program.code not in CODES:
            problems.append(f"exit code {program.code}")
        return Ended(program.code, said, problems)

    def kill(self, victims: Sequence[Role]) -> None:
        for role in sorted(victims):
            with contextlib.suppress(ProcessLookupError):
                if pid := self.page.pids[role]:
                    os.kill(pid, signal.SIGKILL)


def reap() -> None:
    """Orphans of programs: they are this process's."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def cpu_s() -> float:
    """Of this process and all that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def tail(text: str, most: int = 1500) -> str:
    return text if len(text) <= most else f"...{text[-most:]}"
