"""Damage: a bit, a piece or the end of a file that is read back is wrong, or the file is another run's of that name.

Whoever reads it notices, in a sentence, or what comes out is as if nothing had been.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

from lowvram.results.loggers.wandb import RUN_ID_FILE
from tests.faults.lab import Lab, Trial
from tests.faults.results import Results, differences, names
from tests.faults.scenarios import BY_NAME, SWEEP, TAUGHT, Scenario
from tests.faults.telling import Draw, Told

READERS = (
    *("resume", "sweep again", "load", "table", "plan again", "resume every", "load", "resume", "fidelity again"),
    *("resume own", "images again", "learn", "load int8", "load int4", "resume wandb"),
    *(name for name in ("load torch_export", "load pt2e") if name in BY_NAME),
)
OF_TEACHERS = re.compile(r"result\.json$")  # the row of whoever wrote a cache isn't read with it
UNREAD = re.compile(r"native.*\.log$|report\.html$|table\.(md|csv)$|multirun\.yaml$")  # by lowvram
# How a program says that a file which it names in the same line was damaged. Lines about other files prove nothing.
NOTICED = re.compile(
    r"damaged|can't be read|n't match|changed since|was changed|doesn't count|not whole|missing", re.IGNORECASE
)
FOREIGN = re.compile(r"another (run|point|reference)'?s?")  # or left by another run: then a figure may follow from it
HASH = re.compile(r"\.[0-9a-f]{16}\.pt$")
SHARED = ("references", "traces")  # folders whose files are named by what is in them
EXCHANGED = 0.25  # of the trials
GONE = re.compile(r"file|/metrics|/row: |: 'absent' instead|: \d+ instead of \d+: ")  # a difference that may be told
# A run with other words than those of its snapshot is another run: it says which differ, or that they were changed.
WORDS_CHANGED = re.compile(r"overrides\.yaml was changed since the run wrote it")
OTHER_WORDS = re.compile(r"^going on with other values: .+, ", re.MULTILINE)  # than steps, of which more are wanted


def trial(lab: Lab, draw: Draw) -> Told:
    readers = draw.among([BY_NAME[name] for name in READERS])
    random, scenario = draw.random, readers[draw.number % len(readers)]
    wanted = undamaged(lab, scenario)
    trial = lab.trial(scenario, is_planted=random.random() < 0.5)
    cache = with_cache(lab, scenario, trial)
    path = random.choice(readable(trial, cache))
    before, there = content(path), names_in(trial)
    others = twins(lab, trial, scenario, path) if random.random() < EXCHANGED else []
    if others:
        path, about = exchange(path, random.choice(others))
    else:
        about = random.choice(list(DAMAGES.values()))(path, random)
    damaged, run_id = content(path), trial.work / scenario.folder / RUN_ID_FILE
    gone = set(differences(there, names_in(trial)))  # the damage itself
    trial.foreign.plant_among_ours(trial.work / scenario.folder)
    told = Told(f"{scenario.name}: {path.relative_to(trial.folder)}: {about}")
    ended = lab.run(scenario.words, trial.work, environment={"LOWVRAM_CACHE": str(cache)})
    told.problems += ended.problems + trial.foreign.changed() + trial.held()
    if ended.code == 0:
        wrong = differences(wanted, found(trial, scenario, ended.said))
        is_same = content(path) == damaged
        wrong = [one for one in wrong if not (is_same and (is_unread(one) or one in gone))]
        about_it = lines_about(path.relative_to(trial.folder), ended.said)
        if not (others and FOREIGN.search(about_it)):
            told.problems += [one for one in wrong if not is_told(one, about_it)]
        # An id of a whole file, and one without a checksum, as an early version wrote it, are taken.
        is_taken = others or b"\n" not in (damaged or b"").strip()
        if path == run_id and not is_taken and content(path) != before and not NOTICED.search(about_it):
            told.problems.append(f"another run of W&B, without a word: {content(path)} instead of {before}")
        told.about += " (noticed)" if wrong and not told.problems else ""
    elif not ended.said.strip():
        told.problems.append(f"exit code {ended.code} without a word")
    else:
        told.about += f" (exit code {ended.code}: {ended.said.strip()[-300:]})"
    return told


def names_in(trial: Trial) -> Results:
    """Of files alone: what is in them may be damaged."""
    return {"files": names(trial.work, trial.foreign.paths)}


def content(path: Path) -> bytes | None:
    """None if the file is gone."""
    return path.read_bytes() if path.exists() else None


def is_unread(difference: str) -> bool:
    """Whether it is the damage itself: a sweep doesn't read what finished points have beside their rows again."""
    return "/metrics" in difference or "/weights" in difference or difference.endswith("(damaged)")


def lines_about(path: Path, said: str) -> str:
    """The lines of what was said that name this file; of a run's words, the line that lists how they have changed."""
    by_words = OTHER_WORDS.findall(said) if path.parent.name == ".hydra" else []
    name = path.name if HASH.search(path.name) else f"{path.parent.name}/{path.name}"
    return "\n".join([*by_words, *(line for line in said.splitlines() if name in line)])


def is_told(difference: str, about_it: str) -> bool:
    """Damaged rows, lines and files may go, or be put aside, where the lines about the damaged file say so; figures may
    never differ."""
    of_words = OTHER_WORDS.search(about_it) or WORDS_CHANGED.search(about_it)
    return bool(of_words or (GONE.search(difference) and NOTICED.search(about_it)))


def undamaged(lab: Lab, scenario: Scenario) -> Results:
    """What comes out of the reader: files, or for some what it says."""
    if scenario.words[0] != "@load":
        return lab.undisturbed(scenario)[0]
    if scenario.name not in lab.said:
        lab.said[scenario.name] = lab.run(scenario.words, lab.prepared(scenario)).said
    return {"said": lab.said[scenario.name]}


def found(trial: Trial, scenario: Scenario, said: str) -> Results:
    return {"said": said} if scenario.words[0] == "@load" else trial.results()


def with_cache(lab: Lab, scenario: Scenario, trial: Trial) -> Path:
    """The cache of plans and images; a copy that may be damaged of the part that is read."""
    if not scenario.folder.startswith("cache"):
        return lab.shared / "cache"
    shutil.copytree(lab.shared / scenario.folder, trial.folder / scenario.folder)
    return trial.folder / "cache"


def readable(trial: Trial, cache: Path) -> list[Path]:
    """Files that the program may read back. Small ones first are as likely as large ones."""
    around = cache if cache.is_relative_to(trial.folder) else trial.work / trial.scenario.folder
    files = (path for path in sorted(around.glob("**/*")) if path.is_file() and not path.is_symlink())
    files = [path for path in files if path not in trial.foreign.paths and not UNREAD.search(path.name)]
    if trial.scenario.folder == TAUGHT:
        files = [path for path in files if not OF_TEACHERS.search(path.name)]
    return [path for path in files if path.name == RUN_ID_FILE] or files


def twins(lab: Lab, trial: Trial, scenario: Scenario, path: Path) -> list[Path]:
    """Whole files that another run, point, reference or plan has where `path` is."""
    if path.parent.name in SHARED:
        return [one for one in path.parent.iterdir() if one != path]
    if path.is_relative_to(trial.work / SWEEP):
        _, *below = path.relative_to(trial.work / SWEEP).parts
        return [one for one in (trial.work / SWEEP).glob("/".join(["*", *below])) if below and one != path]
    if scenario.before is None or not path.is_relative_to(trial.work):
        return []
    other = replace(scenario, name=f"other {scenario.name}", before=(*scenario.before, "seed=7"))
    folder = lab.prepared(other) / path.parent.relative_to(trial.work)
    return list(folder.glob(HASH.sub(".*.pt", path.name)))


def exchange(path: Path, other: Path) -> tuple[Path, str]:
    """The other one takes the place; of a snapshot, its name has the hash of its bytes."""
    place = path.with_name(other.name) if HASH.search(path.name) else path
    path.unlink()
    shutil.copyfile(other, place)
    return place, f"exchanged for {other.parent.name}/{other.name}"


def write(path: Path, data: bytes) -> None:
    """In place, with the times that it had: nothing tells of it but the bytes."""
    about = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def flip(path: Path, random: Random) -> str:
    data = bytearray(path.read_bytes())
    if not data:
        return "empty already"
    at, bit = random.randrange(len(data)), random.randrange(8)
    data[at] ^= 1 << bit
    write(path, bytes(data))
    return f"bit {bit} of byte {at} flipped"


def flip_digit(path: Path, random: Random) -> str:
    """A digit becomes another one: what text formats take."""
    data = bytearray(path.read_bytes())
    digits = [at for at, byte in enumerate(data) if byte in b"0123456789"]
    if not digits:
        return flip(path, random)
    at = random.choice(digits)
    data[at] = ord(str((int(chr(data[at])) + random.randint(1, 9)) % 10))
    write(path, bytes(data))
    return f"the digit at byte {at} changed: ...{bytes(data[max(0, at - 30) : at + 10])!r}"


def cut(path: Path, random: Random, share: Callable[[Random], float] = Random.random) -> str:
    data = path.read_bytes()
    size = int(len(data) * share(random))
    write(path, data[:size])
    return f"cut to {size} of {len(data)} bytes"


def blank(path: Path, random: Random) -> str:
    """A block that was never written, as after a power cut."""
    data = bytearray(path.read_bytes())
    start = random.randrange(len(data) + 1)
    end = min(len(data), start + random.choice((1, 16, 512, 4096)))
    data[start:end] = bytes(end - start)
    write(path, bytes(data))
    return f"bytes {start} to {end} are zero"


def strange(path: Path, random: Random) -> str:
    write(path, random.choice((b"[]", b"null", b"{}", b"\xff\xfe\0", b"hello\n", b'{"schema": 1}', b"[1,2" * 100)))
    return "another content"


def remove(path: Path, random: Random) -> str:
    path.unlink()
    return "removed"


def remove_line(path: Path, random: Random) -> str:
    lines = path.read_bytes().splitlines(keepends=True)
    if len(lines) < 2:
        return remove(path, random)
    number = random.randrange(len(lines))
    write(path, b"".join(lines[:number] + lines[number + 1 :]))
    return f"line {number + 1} of {len(lines)} removed"


DAMAGES: dict[str, Callable[[Path, Random], str]] = {
    "flip": flip,
    "digit": flip_digit,
    "cut": cut,
    "empty": partial(cut, share=lambda _: 0.0),
    "blank": blank,
    "strange": strange,
    "remove": remove,
    "line": remove_line,
}
