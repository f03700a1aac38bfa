"""Where trials run: folders, warm programs, and what undisturbed ones leave."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import final

from tests.faults import mounts, warm
from tests.faults.foreign import AROUND, WITHIN, Foreign
from tests.faults.results import Results, results, without_choice, without_ids
from tests.faults.scenarios import THEN, Scenario
from tests.faults.shim import Page, Role

CODES = {0, 1, 3, 75}  # docs/command_line.md
LONGEST_S = 90.0  # of a program
NAMING = ("prune.run=", "grow.run=", "task.teacher=", "task.cache=", "data.path=")  # an id follows from a folder's path
ROUND = 20  # to which calls are counted, as a few more or less would make a replay another trial
TORCHRUNS_GRACE_S = 30.0
GONE_S = 20.0  # until the last process of a program has ended: the server's grace and more
TRACEBACK = re.compile(r"Traceback \(most recent call last\)|^\w*Error: |Fatal Python error", re.MULTILINE)


Undisturbed = tuple[Results, int, float, int]
Act = tuple[float, Callable[[Sequence[warm.Program]], object]]  # seconds after the start, and what is done then


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
    reads: re.Pattern[str] = re.compile("")  # of hostile.py: names, below `work`, of files to forge

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
        for name in ("snapshots", "model", ".hydra", "tensorboard", "wandb", "cache"):
            self.foreign.forget(run / name)
            shutil.rmtree(run / name, ignore_errors=True)
        for path in run.iterdir():
            if path not in self.foreign.paths and not path.is_dir():
                path.unlink()

    def results(self) -> Results:
        found = results(self.work, self.foreign.paths)
        if any(word.startswith(NAMING) for word in self.scenario.words):
            found = without_ids(found)
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

    def __init__(self, base: Path, shared: Path, page: Page, may_mount: bool = False) -> None:
        self.base, self.shared, self.page, self.may_mount = base, shared, page, may_mount
        self.environment = {"LOWVRAM_CACHE": str(shared / "cache"), "COLUMNS": "200"}
        self._undisturbed: dict[str, Undisturbed] = {}
        self.said: dict[str, str] = {}  # by undisturbed programs
        base.mkdir(parents=True, exist_ok=True)

    def trial(self, scenario: Scenario, is_planted: bool, options: str | None = None) -> Trial:
        """A new folder with what the scenario needs before, and foreign files also in the folder of its run.

        Args:
            options: of a file system in memory that the programs' folder is.
        """
        folder = self.base / "trial"
        mounts.unmount_below(folder)
        shutil.rmtree(folder, ignore_errors=True)
        trial = Trial(folder, Foreign(folder), scenario)
        trial.work.mkdir(parents=True)
        if options is not None:
            mounts.mount(trial.work, options)
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
            for words in commands(scenario.before):
                ended = self.run(words, beside, num_programs=scenario.num_programs)
                assert ended.code == 0, ended
            folder.parent.mkdir(exist_ok=True)
            with contextlib.suppress(OSError):  # another process was faster
                beside.rename(folder)
            shutil.rmtree(beside, ignore_errors=True)
        return folder

    def open_to_all(self) -> None:
        """Other users may come to the folders of trials."""
        for folder in (self.shared, self.base.parent, self.base, self.base / "trial"):
            folder.chmod(0o755)

    def undisturbed(self, scenario: Scenario) -> Undisturbed:
        """What the scenario leaves, how many calls of its (the shim's) change files, how long it takes in s, and how
        many bytes its files are."""
        if scenario.name not in self._undisturbed:
            kept = self.shared / f"{scenario.name}.json"
            if not kept.exists():
                self._run_undisturbed(scenario)  # fills the cache of plans, which changes what calls there are
                beside = self.base / "undisturbed.json"
                beside.write_text(json.dumps(self._run_undisturbed(scenario)))
                beside.rename(kept)
            self._undisturbed[scenario.name] = tuple(json.loads(kept.read_text()))
        return self._undisturbed[scenario.name]

    def _run_undisturbed(self, scenario: Scenario) -> Undisturbed:
        trial, began = self.trial(scenario, is_planted=False), time.monotonic()
        ended = self.run(
            scenario.words, trial.work, lambda page: page.begin(trial.work), num_programs=scenario.num_programs
        )
        assert ended.code == 0, (scenario.name, ended)
        num_calls = -(-self.page.count // ROUND) * ROUND
        took_s = time.monotonic() - began
        return trial.results(), num_calls, took_s, sum(path.lstat().st_size for path in trial.work.rglob("*"))

    def run(
        self,
        words: Sequence[str],
        work: Path,
        arm: Callable[[Page], object] = lambda page: page.rest(),
        acts: Sequence[Act] = (),
        environment: dict[str, str] | None = None,
        prepare: Callable[[], object] = lambda: None,
        num_programs: int = 1,
    ) -> Ended:
        """A program from its start until the last of its processes has ended. `prepare` is called in its process.

        Args:
            num_programs: more than one: as many as torchrun starts, each a rank.
        """
        arm(self.page)
        if num_programs == 1:
            return self.follow([self.begin(words, work, environment, prepare=prepare)], acts)[0]
        port = str(free_port())
        programs = []
        for rank in range(num_programs):
            number = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_programs, "LOCAL_WORLD_SIZE": num_programs}
            about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | {key: str(at) for key, at in number.items()}
            programs.append(self.begin(words, work, {**about, **(environment or {})}, f"out{rank}", prepare))
        ended = self.follow(programs, acts, end_together=True)
        failed = [one for one in ended if one.code != 0]
        problems = list(dict.fromkeys(problem for one in ended for problem in one.problems))
        return Ended(failed[0].code if failed else 0, "".join(one.said for one in ended), problems)

    def begin(
        self,
        words: Sequence[str],
        work: Path,
        environment: dict[str, str] | None = None,
        name: str = "out",
        prepare: Callable[[], object] = lambda: None,
    ) -> warm.Program:
        """Start a program whose streams are a file of this name."""
        out = self.base / name
        out.write_bytes(b"")
        return warm.begin(words, work, out, self.page, {**self.environment, **(environment or {})}, prepare)

    def follow(
        self, programs: Sequence[warm.Program], acts: Sequence[Act] = (), end_together: bool = False
    ) -> list[Ended]:
        """Until the last process of the last program has ended, with what is done to them meanwhile.

        Args:
            end_together: if one fails, the others are asked to end and, a while later, killed, as by torchrun.
        """
        killing_s = inf
        began, due, late = programs[0].began, sorted(acts, key=lambda act: act[0]), list[str]()
        while None in [program.poll() for program in programs]:  # each is asked
            passed_s = time.monotonic() - began
            while due and passed_s >= due[0][0]:
                due.pop(0)[1](programs)
            if end_together and any(program.code for program in programs):
                end_together = False
                for program in programs:
                    program.ask_to_end()
                killing_s = passed_s + TORCHRUNS_GRACE_S
            if passed_s > killing_s:
                killing_s = inf
                for program in programs:
                    program.kill()
            if passed_s > LONGEST_S:
                late = late or [f"the program still ran after {LONGEST_S} s"]
                for program in programs:
                    program.kill()
            time.sleep(0.003)
        deadline = time.monotonic() + GONE_S
        while left := [pid for program in programs for pid in program.members()]:
            if due:  # a process that was stopped is to go on
                due.pop(0)[1](programs)
            if time.monotonic() > deadline:
                deadline = inf
                late.append(f"{len(left)} processes were left {GONE_S} s after the end")
                for program in programs:
                    program.kill()
            time.sleep(0.02)
        self.page.rest()  # the suite itself works there too
        reap()
        return [how_ended(program, late) for program in programs]

    def signal(self, number: signal.Signals, victims: Sequence[Role]) -> None:
        for role in sorted(victims):
            with contextlib.suppress(ProcessLookupError):
                if pid := self.page.pids[role]:
                    os.kill(pid, number)


def commands(words: Sequence[str]) -> list[list[str]]:
    """The words of each command."""
    found: list[list[str]] = [[]]
    for word in words:
        if word == THEN:
            found.append([])
        else:
            found[-1].append(word)
    return found


def how_ended(program: warm.Program, problems: Sequence[str]) -> Ended:
    """With what is wrong whatever the program was."""
    said, problems = program.said(), list(problems)
    if TRACEBACK.search(said):
        problems.append(f"a traceback: {tail(said)}")
    if program.code is not None and program.code >= 0 and program.code not in CODES:
        problems.append(f"exit code {program.code}")
    return Ended(program.code, said, problems)


def free_port() -> int:
    """One that no program is given by chance, until torchrun's has it."""
    with socket.socket() as one:
        for port in random.sample(range(20000, 30000), 100):
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", port))
                return port
    raise RuntimeError("no port is free")


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
