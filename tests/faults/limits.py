"""Limits that the system sets, for one program: a disk that is really full, a largest file, numbers of descriptors and
processes, memory. Then, without the limit, once more.

Unlike the shim's errors, libraries that write in C meet these too, and a limit lasts as long as the program.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from lowvram.launch.supervisor import PR_SET_PDEATHSIG, prctl
from lowvram.results.row import Status
from tests.faults import mounts
from tests.faults.configurations import row_of
from tests.faults.going_on import finish, goes_on
from tests.faults.lab import Lab, Trial
from tests.faults.results import differences
from tests.faults.scenarios import BY_NAME, RANKS, Scenario
from tests.faults.telling import Draw, Told

SCENARIOS = (
    *("train", "sweep", "resume", "measure", "train every", "sweep of one", "plan", "own", "images", "teach", "prune"),
    *("train int8", "train tensorboard", "train ddp"),
)
WITH_WORKERS = ("loader=workers", "loader.num_workers=1")
PLENTY = "size=256m,nr_inodes=100k"
NOBODY = 60_000  # and above: users without processes of their own
PR_SET_DUMPABLE = 4
MIB = 2**20


@dataclass
class Limit:
    """What holds in one program, and how it ends afterwards."""

    about: str
    prepare: Callable[[], object] = lambda: None  # in the program's process
    environment: dict[str, str] = field(default_factory=dict)
    lift: Callable[[], object] = lambda: None


def trial(lab: Lab, draw: Draw) -> Told:
    random = draw.random
    scenario = random.choice(draw.among([BY_NAME[name] for name in SCENARIOS]))
    is_one_run = scenario.resumes and scenario not in RANKS
    make = random.choice([make for make in LIMITS if is_one_run or make not in OF_MEMORY])
    if make in MOUNTED and not lab.may_mount:
        return Told(f"skipped: mounting isn't allowed here, which {make.__name__} needs")
    if make in OF_WORKERS and not scenario.words[0].startswith("resume") and random.random() < 0.6:
        scenario = replace(scenario, name=f"{scenario.name} with workers", words=(*scenario.words, *WITH_WORKERS))
    wanted, *_, used_bytes = lab.undisturbed(scenario)
    trial = lab.trial(scenario, is_planted=random.random() < 0.5, options=PLENTY if make is full_disk else None)
    limit = make(lab, trial, scenario, used_bytes, random)
    told = Told(f"{scenario.name}: {limit.about}")
    ended = lab.run(scenario.words, trial.work, prepare=limit.prepare, environment=limit.environment)
    limit.lift()
    told.about += f" -> {ended.code}"
    told.problems += ended.problems
    if ended.code and not ended.said.strip():
        told.problems.append(f"exit code {ended.code} without a word")
    is_done = ended.code == 0 and not is_out_of_memory(trial, make)
    if is_done:
        told.problems += [one for one in differences(wanted, trial.results()) if "file" not in one]
    if not told.problems and (not is_done or scenario.words[0] == "-m"):
        told.problems += finish(lab, trial, scenario, goes_on(scenario, scenario.words, trial))
        told.problems += differences(wanted, trial.results()) if not told.problems else []
    told.problems += [f"said: {ended.said[-1200:]}"] if told.problems else []
    told.problems += trial.foreign.changed() + trial.held()
    return told


def is_out_of_memory(trial: Trial, make: Any) -> bool:
    """Of a limit of memory, where this ends a run as it should; no retry changes that, but another limit."""
    row = row_of(trial.work / trial.scenario.folder) if make in OF_MEMORY else None
    return row is not None and row["status"] == Status.OOM.value


def full_disk(lab: Lab, trial: Trial, scenario: Scenario, used_bytes: int, random: Random) -> Limit:
    """Of bytes, or of files."""
    about = os.statvfs(trial.work)
    held, files = (about.f_blocks - about.f_bfree) * about.f_frsize, about.f_files - about.f_ffree
    if random.random() < 0.75:
        room = random.randrange(1, max(2, used_bytes // about.f_frsize + 8)) * about.f_frsize
        options, said = f"size={held + room},nr_inodes=100k", f"a disk with room for {room} bytes"
    else:
        room = random.randrange(1, 30)
        options, said = f"size=256m,nr_inodes={files + room}", f"a disk with room for {room} files"
    mounts.mount(trial.work, options, mounts.MS_REMOUNT)
    return Limit(said, lift=partial(mounts.mount, trial.work, PLENTY, mounts.MS_REMOUNT))


def full_cache(lab: Lab, trial: Trial, scenario: Scenario, used_bytes: int, random: Random) -> Limit:
    """Where plans and images are kept: no error at all."""
    return Limit("the cache's disk is full", environment={"LOWVRAM_CACHE": str(small(trial.folder / "full", random))})


def full_temporary(lab: Lab, trial: Trial, scenario: Scenario, used_bytes: int, random: Random) -> Limit:
    folder = small(trial.folder / "full", random)
    return Limit("TMPDIR is full", environment={"TMPDIR": str(folder)})


def small(folder: Path, random: Random) -> Path:
    """A folder in which hardly anything can be written."""
    folder.mkdir()
    mounts.mount(folder, random.choice(("size=4k", "nr_inodes=1", "nr_inodes=2", "size=32k")))
    return folder


def full_shared_memory(lab: Lab, trial: Trial, scenario: Scenario, used_bytes: int, random: Random) -> Limit:
    """/dev/shm, of one program alone."""
    size = random.choice((4, 16, 64, 512))
    return Limit(f"/dev/shm of {size} KiB", partial(shrink_shared_memory, lab.shared, size))


def shrink_shared_memory(base: Path, size_kib: int) -> None:
    """Mount another /dev/shm; the campaign's folder, if it lies there, is in it."""
    mounts.become_private()
    shared, beside = Path("/dev/shm"), Path("/mnt")
    mounts.mount(beside, f"size={size_kib}k")
    if base.is_relative_to(shared):
        (beside / base.name).mkdir()
        mounts.bind(base, beside / base.name)
    mounts.move(beside, shared)
    os.chdir(Path.cwd())  # that of the other mount


def largest_file(lab: Lab, trial: Trial, scenario: Scenario, used_bytes: int, random: Random) -> Limit:
    size = random.choice((2**10, 2**14, 2**16, 2**18)) + random.randrange(1000)
    return Limit(f"RLIMIT_FSIZE={size}", partial(limit, resource.RLIMIT_FSIZE, size))


def descriptors(lab: Lab, trial: Trial, scenario: Scenario, used_bytes: int, random: Random) -> Limit:
    number = random.randint(6, 40)
    return Limit(f"RLIMIT_NOFILE={number}", partial(limit, resource.RLIMIT_NOFILE, number))


def processes(lab: Lab, trial: Trial, scenario: Scenario, used_bytes: int, random: Random) -> Limit:
    """Of a user without rights, as root has no such limit."""
    number, user = random.randint(1, 8), NOBODY + os.getpid() % 5000
    for path in (trial.work, *trial.work.rglob("*")):
        os.chown(path, user, user, follow_symlinks=False)
    lab.open_to_all()
    return Limit(f"RLIMIT_NPROC={number}", partial(become_limited, user, number), {"HOME": str(trial.work)})


def become_limited(user: int, number: int) -> None:
    limit(resource.RLIMIT_NPROC, number)
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    prctl(PR_SET_DUMPABLE, 1)  # /proc/self stays its own
    prctl(PR_SET_PDEATHSIG, 9)


def address_space(lab: Lab, trial: Trial, scenario: Scenario, used_bytes: int, random: Random) -> Limit:
    more = random.randrange(200) * MIB
    return Limit(f"RLIMIT_AS: {more // MIB} MiB more", partial(limit_memory, resource.RLIMIT_AS, "VmSize", more))


def data_segment(lab: Lab, trial: Trial, scenario: Scenario, used_bytes: int, random: Random) -> Limit:
    more = random.randrange(200) * MIB
    return Limit(f"RLIMIT_DATA: {more // MIB} MiB more", partial(limit_memory, resource.RLIMIT_DATA, "VmData", more))


def limit_memory(which: int, name: str, more: int) -> None:
    """What this process has, and so many bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limit(which, int(lines[name].split()[0]) * 1024 + more)


def limit(which: int, number: int) -> None:
    resource.setrlimit(which, (number, number))


OF_WORKERS = (full_temporary, full_shared_memory, descriptors)
OF_MEMORY = (
    address_space,
    data_segment,
)  # for one rank, as others would wait for it; a sweep keeps points that ran out of memory
MOUNTED = (full_disk, full_cache, full_temporary, full_shared_memory)
LIMITS = (
    *(full_disk, full_disk, full_disk, full_cache, full_temporary, full_shared_memory),
    *(largest_file, largest_file, descriptors, processes, address_space, data_segment),
)
