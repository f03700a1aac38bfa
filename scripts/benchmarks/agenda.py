"""What only a card can tell, most valuable first, within a budget of minutes; `scripts/gpu_check agenda` runs this.

    scripts/gpu_check agenda [FOLDER] [only=ITEM,...] [trial]   measures what FOLDER doesn't have yet
    scripts/gpu_check agenda keep [FOLDER]                      writes it to docs/results/CARD/

BUDGET_MIN (12) is how many minutes it may take. FOLDER (outputs/gpu_agenda) keeps agenda.jsonl, a line for each item
(agenda_items.py) that has ended, and agenda.log with what the items printed. An item that is there is not run again.
`trial` takes small models: for an emulated card.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lowvram.config.identity import ROOT, device_name
from lowvram.results import table
from lowvram.results.files.durable import write_text
from scripts.benchmarks.agenda_items import Item, Kind, items
from scripts.benchmarks.agenda_report import report
from scripts.benchmarks.bench_headline import EMULATED, results_folder
from scripts.benchmarks.book import Book, Line, stamp
from scripts.pages.technique_rows import stripped

GRACE_S = 10  # for an item that is ended to record what it has
LEAST_S = 10  # an item isn't begun with less
SLOWER = 6  # an emulated card computes on the CPU
OUTCOME = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED)\s+(tests/\S+(?: - .*)?)")


@dataclass(frozen=True)
class Asked:
    """What was typed."""

    folder: Path
    only: tuple[str, ...]
    is_trial: bool
    keeps: bool


def asked(words: Sequence[str]) -> Asked:
    """Exits at a word that nothing knows."""
    folder, only, flags = Path("outputs/gpu_agenda"), (), set[str]()
    names = [item.name for item in items(False)]
    for word in words:
        key, equals, value = word.partition("=")
        if word in ("trial", "keep"):
            flags.add(word)
        elif key == "only" and equals:
            only = tuple(value.split(","))
            if unknown := set(only) - set(names):
                sys.exit(f"only={','.join(sorted(unknown))}: must be some of {', '.join(names)}, with commas")
        elif equals or word.startswith("-"):
            sys.exit(f"{word}: must be only=ITEM,..., trial, keep, or a folder")
        else:
            folder = Path(word)
    return Asked(folder.absolute(), only, "trial" in flags, "keep" in flags)


def command(item: Item, work: Path) -> list[str]:
    """How an item is started."""
    match item.kind:
        case Kind.POINTS:
            is_preset = any(word.startswith("sweep=") for word in item.words)
            words = item.words if is_preset else ("-m", *item.words)
            return [sys.executable, str(ROOT / "train.py"), *words, f"hydra.sweep.dir={work / item.name}"]
        case Kind.PROBE:
            return [sys.executable, str(ROOT / "scripts" / "benchmarks" / "card_probes.py"), *item.words]
        case Kind.TESTS:
            # pytest-benchmark warns beside xdist, and warnings are errors.
            plain = ("-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "scripts.benchmarks.told_at_once")
            several = ("-c", str(ROOT / "pyproject.toml"), "-n", "8", "-v", "-rfE", "--tb=short")
            return [sys.executable, "-m", "pytest", *item.words, "-m", "gpu", *plain, *several]


def run(item: Item, folder: Path, left_s: float) -> Line:
    """One item, to its end or to its limit. Returns its line of the book."""
    limit_s, began = min(item.limit_s * (SLOWER if EMULATED else 1), left_s), time.monotonic()
    with (folder / "agenda.log").open("a+b") as log:
        start = log.seek(0, os.SEEK_END)
        log.write(f"\n=== {item.name}: {item.about}\n".encode())
        log.flush()
        code = ended(command(item, folder / "work"), log, limit_s)
        log.seek(start)
        printed = log.read().decode(errors="replace")
    about = {"key": item.name, "kind": item.kind.value, "about": item.about, "device": device_name(), **stamp()}
    outcome = {"code": code, "is_cut": code is None, "seconds": round(time.monotonic() - began, 1)}
    return {**about, **outcome, "found": found(item, folder / "work", printed), "tail": printed[-1500:]}


def ended(words: Sequence[str], log: IO[bytes], limit_s: float) -> int | None:
    """The exit code of a program; None if its time was over. Nothing that it started is left."""
    with subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    ) as program:
        try:
            return program.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGINT)
            try:
                program.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(program.pid, signal.SIGKILL)
            return None


def found(item: Item, work: Path, printed: str) -> list[Line]:
    """What an item has measured."""
    match item.kind:
        case Kind.POINTS:
            return [dict(row) for row in table.collect(work / item.name)]
        case Kind.PROBE:
            return [figures for line in printed.splitlines() if (figures := figures_in(line))]
        case Kind.TESTS:
            outcomes = {test: outcome for outcome, test in OUTCOME.findall(printed)}
            return [{"test": test, "outcome": outcome} for test, outcome in outcomes.items()]


def figures_in(line: str) -> Line:
    """What a probe has printed; nothing of another line, or of one that was cut off."""
    try:
        return json.loads(line) if line.startswith("{") else {}
    except ValueError:
        return {}


def run_all(given: Asked, budget_s: float) -> int:
    """All items that aren't in the book, while there is time. Returns the exit code: 1 if any failed or is missing."""
    book, began = Book(given.folder / "agenda.jsonl"), time.monotonic()
    given.folder.mkdir(parents=True, exist_ok=True)
    for item in items(given.is_trial):
        left_s = budget_s - (time.monotonic() - began) - GRACE_S
        line = book.read().get(item.name)
        if (given.only and item.name not in given.only) or (line is not None and not line["is_cut"]):
            continue
        if left_s < LEAST_S:
            print(f"{item.name}: no time is left", flush=True)
            continue
        line = run(item, given.folder, left_s)
        if line["found"] or not line["is_cut"]:
            book.add(line)
        print(f"{item.name}: {verdict(line)}, {line['seconds']:.0f} s", flush=True)
    lines = book.read()
    wanted = given.only or tuple(item.name for item in items(given.is_trial))
    return int(any(name not in lines or lines[name]["code"] != 0 for name in wanted))


def verdict(line: Line) -> str:
    if line["is_cut"]:
        return f"cut off after {len(line['found'])} results"
    return (
        f"{len(line['found'])} results" if line["code"] == 0 else f"exit {line['code']}, {len(line['found'])} results"
    )


def keep(folder: Path) -> None:
    """Write what was measured to docs/results/CARD/."""
    lines = [*Book(folder / "agenda.jsonl").read().values()]
    if not lines:
        sys.exit(f"{folder}/agenda.jsonl: nothing was measured: run scripts/gpu_check agenda {folder} first")
    (device,) = {line["device"] for line in lines}
    to = results_folder(device)
    to.mkdir(parents=True, exist_ok=True)
    write_text(to / "agenda.jsonl", "".join(json.dumps(without_places(line)) + "\n" for line in lines))
    write_text(to / "agenda.md", "\n".join(report(lines)) + "\n")
    print(f"results: {to}")


def without_places(line: Line) -> Line:
    """What others need of it: no paths of this machine."""
    found = [stripped(row, {}) for row in line["found"]] if line["kind"] == Kind.POINTS.value else line["found"]
    return {key: value for key, value in line.items() if key != "tail"} | {"found": found}


def main() -> None:
    given = asked(sys.argv[1:])
    if given.keeps:
        keep(given.folder)
        return
    budget = os.environ.get("BUDGET_MIN", "12")
    if not re.fullmatch(r"\d+(\.\d+)?", budget):
        sys.exit(f"BUDGET_MIN={budget}: must be a number of minutes")
    if EMULATED:
        print("emulated: memory alone; times are the host's and mean nothing")
    sys.exit(run_all(given, 60 * float(budget)))


if __name__ == "__main__":
    main()
