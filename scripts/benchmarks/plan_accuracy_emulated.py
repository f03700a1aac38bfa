"""How far plans lie from torch's real allocator on emulated cards, and whether budgets hold. Memory only.

    scripts/emulated_gpu python scripts/benchmarks/plan_accuracy_emulated.py [FOLDER] [cards=CARDS] [most=N] [replan]
        [budgets=N] [drawn=N | meshes=N] [print]

Every point of emulated_points.py is planned for its card, then runs two updates on it as tests/emulated_cuda emulates
it: torch's own CUDA build with its dispatcher, its choice of kernels and its caching allocator, over a device whose
kernels compute nothing. Operators over 4 MiB get no values, so large models run in seconds. FOLDER (default:
docs/results/emulated) keeps plan_accuracy_predictions.jsonl and plan_accuracy_measured.jsonl; what is measured there
isn't measured again, `replan` plans all anew. `budgets=N` runs the first N held-out points of each card under `vram=`
of their own `least_vram_bytes` and of 5 % less (plan_accuracy_budgets.jsonl). `drawn=N` takes N points of
drawn_points.py instead, all of them held out (FOLDER: docs/results/emulated/drawn), `meshes=N` N points of
drawn_meshes.py, over two and four cards (docs/results/emulated/meshes). CARDS are some of conf/data_sheets, with
commas. `most=N` measures no more than N points of a card, `print` none. The report is a Markdown page on standard
output. About 12 s a point on one core.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from lowvram.config.identity import ROOT
from lowvram.planning.devices import load_device
from lowvram.planning.memory.context import context_bytes
from scripts.benchmarks import drawn_meshes, drawn_points, emulated_points
from scripts.benchmarks.book import Book, stamp
from scripts.benchmarks.emulated_points import Point
from scripts.benchmarks.plan_accuracy import COMMON, MEASURED, is_done, predicted, say
from scripts.benchmarks.plan_accuracy_emulated_report import BUDGET_SHARES, EmulatedReport
from scripts.benchmarks.plan_accuracy_report import Line
from scripts.benchmarks.runs import Runs

MOST_VALUES_BYTES = 2**22  # of an operator that gets values: all that decides how a run goes on, such as masks
MOST_VALUES_BYTES_OF_RANKS = 2**26  # also weights that are gathered: what is computed twice is compared
DRAWS: dict[str, ModuleType] = {"drawn": drawn_points, "meshes": drawn_meshes}


class Asked(NamedTuple):
    """What was typed."""

    folder: Path
    cards: tuple[str, ...]  # none: all
    most: int | None  # points of a card that are measured
    num_budgets: int
    draw: str  # of DRAWS; "": the points of emulated_points.py
    num_drawn: int
    replans: bool
    is_child: bool  # this process is on the card

    @property
    def points(self) -> list[Point]:
        return DRAWS[self.draw].drawn_points(self.num_drawn) if self.draw else emulated_points.emulated_points()


def asked(words: Sequence[str]) -> Asked:
    values = dict(word.split("=", 1) for word in words if "=" in word)
    folders = [Path(word) for word in words if "=" not in word and word not in ("replan", "print", "child")]
    most = 0 if "print" in words else int(values["most"]) if "most" in values else None
    draw = next((name for name in DRAWS if name in values), "")
    default = ROOT / "docs" / "results" / "emulated" / draw
    return Asked(
        folder=folders[0] if folders else default,
        cards=tuple(filter(None, values.get("cards", "").split(","))),
        most=most,
        num_budgets=int(values.get("budgets", 0)),
        draw=draw,
        num_drawn=int(values.get(draw, 0)),
        replans="replan" in words,
        is_child="child" in words,
    )


class Books:
    """The files of one folder."""

    def __init__(self, folder: Path) -> None:
        self.predictions, self.measured, self.budgets = (
            Book(folder / f"plan_accuracy_{name}.jsonl") for name in ("predictions", "measured", "budgets")
        )


def key_of(point: Point) -> str:
    return f"{point.name} torch={torch.__version__}"


def about(point: Point) -> Line:
    return {"key": key_of(point), "name": point.name, "card": point.card, "emulated": "memory only", **stamp()}


def plan_all(book: Book, points: Sequence[Point], runs: Runs, replans: bool) -> None:
    if replans:
        book.forget({key_of(point) for point in points})
    known = book.read()
    missing = [point for point in points if key_of(point) not in known]
    words = {point.name: [*COMMON, *point.spec.words, f"plan.device={point.card}"] for point in missing}
    for point, row in zip(missing, runs.plan(words) if words else [], strict=True):
        book.add({**about(point), **predicted(row)})


def measure_all(book: Book, points: Sequence[Point], runs: Runs, most: int | None) -> None:
    known = book.read()
    missing = [point for point in points if not is_done(known.get(key_of(point)))][:most]
    for number, point in enumerate(missing, start=1):
        say(f"{point.card}: measure {number} of {len(missing)}: {point.name}")
        row = runs.run(point.name, [*MEASURED, *COMMON, *point.spec.words])
        memory = {name: row["memory"][name] for name in ("peak_bytes", "reserved_bytes", "device_bytes")}
        outcome = {"status": row["status"], "reason": row["reason"], "total_s": row["time"]["total_s"]}
        book.add({**about(point), **outcome, **memory})


def try_budgets(book: Book, points: Sequence[Point], predictions: Book, runs: Runs, most: int) -> None:
    """Run held-out points under shares of the least memory that their plans ask for."""
    known, planned = book.read(), predictions.read()
    for point in [point for point in points if point.is_held_out][:most]:
        least_bytes = planned.get(key_of(point), {}).get("least_vram_bytes")
        for share in BUDGET_SHARES:
            key = f"{key_of(point)} vram={share:g}"
            if least_bytes is None or (key in known and known[key]["least_vram_bytes"] == least_bytes):
                continue
            say(f"{point.card}: {point.name} under {share:.0%}")
            vram = f"vram={share * least_bytes / 2**30:.9f}GiB"
            row = runs.run(point.name, [*MEASURED, *COMMON, *point.spec.words, vram])
            outcome = {"status": row["status"], "reason": row["reason"], "least_vram_bytes": least_bytes}
            book.add({**about(point), "key": key, "share": share, **outcome})


def work_on(card: str, given: Asked) -> None:
    """All that is asked of one card, in a process that has it."""
    points, books = [point for point in given.points if point.card == card], Books(given.folder)
    DRAWS.get(given.draw, emulated_points).write_models()
    with tempfile.TemporaryDirectory() as folder, Runs(Path(folder) / "points") as runs:
        plan_all(books.predictions, points, runs, given.replans)
        measure_all(books.measured, points, runs, given.most)
        try_budgets(books.budgets, points, books.predictions, runs, given.num_budgets)


def environment_of(card: str, draw: str) -> dict[str, str]:
    is_mesh = draw == "meshes"
    values = {
        "EMULATED_CARD": card,
        "EMULATED_CONTEXT_MIB": context_bytes(load_device(card).multiprocessors)[1] // 2**20,  # as plans count it
        "EMULATED_DEVICES": drawn_meshes.MOST_CARDS if is_mesh else 1,
        "EMULATED_VALUES": 1,
        "EMULATED_VALUES_MAX": MOST_VALUES_BYTES_OF_RANKS if is_mesh else MOST_VALUES_BYTES,
    }
    return {**os.environ, **{name: str(value) for name, value in values.items()}}


def main() -> None:
    given = asked(sys.argv[1:])
    if given.is_child:
        work_on(given.cards[0], given)
        return
    points = given.points
    cards = given.cards or tuple(dict.fromkeys(point.card for point in points))
    for card in cards:
        words = [word for word in sys.argv[1:] if not word.startswith("cards=")]
        command = [sys.executable, __file__, *words, f"cards={card}", "child"]
        subprocess.run(command, check=True, env=environment_of(card, given.draw), cwd=ROOT)
    books = Books(given.folder)
    lines = (book.read() for book in (books.predictions, books.measured, books.budgets))
    report = EmulatedReport(points, *lines, key_of=key_of)  # pyright: ignore[reportCallIssue]
    print("\n".join(report.lines()))


if __name__ == "__main__":
    main()
