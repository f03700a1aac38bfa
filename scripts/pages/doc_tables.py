"""The measured tables of README.md and docs/*.md, each made of rows that the commands above it have left.

    scripts/python scripts/pages/doc_tables.py                        writes the tables into their pages
    scripts/python scripts/pages/doc_tables.py --check                1 if a page is not what its rows say
    scripts/python scripts/pages/doc_tables.py --run NAME...          runs the commands above NAME's table, writes
    scripts/python scripts/pages/doc_tables.py --keep NAME FOLDER... the same, of commands that have left these folders

A page says where a table stands, in which shape, of which rows and with which figures of each:

    <!-- grid ckpt: peak / activations -->
    <!-- end -->

Rows lie in docs/results/cpu/docs/NAME.jsonl, headed by their commands, which the page's last block of bash must repeat.
The shapes are in doc_shapes.py. An excerpt of what a command has printed is written by hand; each of its lines
must be among those that were printed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowvram.config.errors import Refused
from lowvram.config.identity import ROOT
from lowvram.results import table
from lowvram.results.files.durable import write_text
from scripts.pages.doc_shapes import SHAPES, Place
from scripts.pages.technique_rows import stripped

RESULTS = ROOT / "docs" / "results" / "cpu"
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MARK = re.compile(
    r"^<!-- (?P<shape>\w+) (?P<name>[^:\n]+?)(?:: (?P<about>[^\n]+))? -->\n(?P<body>.*?)^<!-- end -->$",
    re.DOTALL | re.MULTILINE,
)
SHELL = """
number=0
python() {
    [[ "$*" == *logger=* ]] || set -- "$@" logger=none
    number=$((number + 1))
    "$PYTHON" "$@" "hydra.run.dir=$FOLDER/$number" "hydra.sweep.dir=$FOLDER/$number"
}
"""


@dataclass(frozen=True)
class Page:
    """One file of Markdown."""

    path: Path

    def places(self) -> Iterator[tuple[Place, tuple[int, int]]]:
        """Its tables, each with where its body stands in the text."""
        text = self.path.read_text(encoding="utf-8")
        blocks = [*BLOCK.finditer(text)]
        for mark in MARK.finditer(text):
            above = [block[1] for block in blocks if block.end() < mark.start()]
            commands = above[-1] if above else ""
            place = Place(mark["shape"], mark["name"], mark["about"] or "", mark["body"], commands)
            yield place, mark.span("body")

    def made(self, results: Path) -> str:
        """The text with its tables made anew. Refused: as `Shape.lines`, and for a shape or figure that isn't known."""
        whole, text, end = self.path.read_text(encoding="utf-8"), "", 0
        for place, (start, stop) in self.places():
            try:
                lines = [*SHAPES[place.shape].lines(place, results)]
            except (Refused, KeyError) as error:
                raise Refused(f"{self.path.name}: {place.shape} {place.name}: {error}") from None
            text += whole[end:start] + "".join(f"{line}\n" for line in ("", *lines, ""))
            end = stop
        return text + whole[end:]


def ran(commands: str, folder: Path) -> str:
    """Runs them, each into a folder of its own below that one; returns what they have printed."""
    script = SHELL + commands.replace("scripts/train ", "python train.py ")
    about = {**os.environ, "PYTHON": sys.executable, "LOWVRAM_PYTHON": sys.executable, "FOLDER": str(folder)}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env=about,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout.replace(str(folder), "outputs").replace(sys.executable, "python")


def keep(place: Place, folders: Iterable[Path], printed: str, results: Path) -> None:
    rows = [stripped(row, {}) for folder in folders for row in table.collect(folder)]
    SHAPES[place.shape].keep(place, rows, printed, results)


def keep_asked(typed: argparse.Namespace, found: Mapping[str, Place], results: Path) -> None:
    """What the command line says of rows. Refused: a table that no page has."""
    for name in (*typed.run, *typed.keep[:1]):
        if name not in found:
            raise Refused(f"no page has a table {name}: use one of {', '.join(found)}")
    if typed.keep:
        keep(found[typed.keep[0]], map(Path, typed.keep[1:]), "", results)
    for name in typed.run:
        with tempfile.TemporaryDirectory() as folder:
            printed = ran(found[name].commands, Path(folder))
            keep(found[name], sorted(Path(folder).iterdir(), key=lambda path: int(path.name)), printed, results)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT, results: Path = RESULTS) -> int:
    """Writes the tables, or looks whether they are what the rows say."""
    parser = argparse.ArgumentParser("doc_tables.py", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page differs")
    parser.add_argument("--run", metavar="NAME", nargs="+", default=[], help="tables whose commands to run first")
    parser.add_argument("--keep", metavar="WORD", nargs="+", default=[], help="a table, and its commands' folders")
    typed = parser.parse_args(arguments)
    pages = [Page(path) for path in (root / "README.md", *sorted((root / "docs").glob("*.md")))]
    try:
        keep_asked(typed, {place.name: place for page in pages for place, _ in page.places()}, results)
    except Refused as error:
        print(error, file=sys.stderr)
        return 3
    wrong = [sentence for page in pages if (sentence := brought(page, results, typed.check))]
    print(*wrong, sep="\n", end="\n" * bool(wrong), file=sys.stderr)
    return (1 if typed.check else 3) * bool(wrong)


def brought(page: Page, results: Path, is_check: bool) -> str | None:
    """Brings a page to what its rows say, or only looks; returns what is wrong with it."""
    try:
        text = page.made(results)
    except Refused as error:
        return str(error)
    if text != page.path.read_text(encoding="utf-8") and is_check:
        return f"{page.path.name} isn't what its rows say: run scripts/python scripts/pages/doc_tables.py"
    if not is_check:
        write_text(page.path, text)
    return None


if __name__ == "__main__":
    sys.exit(main())
