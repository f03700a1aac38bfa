"""The report of a sweep: one HTML file that holds its data, style and script, and opens offline. Needs no torch.

data.py makes the data that it shows; the files of page/ draw them. Names, reasons and commands come from outside: they
are escaped here, and the script writes them as text, never as markup.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import sys
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from string import Template

from lowvram.config.errors import Refused
from lowvram.results.files.durable import write_text
from lowvram.results.report.data import Entry, Evidence, entries, evidence
from lowvram.results.row import FILE_NAME as ROW_FILE
from lowvram.results.row import to_json
from lowvram.results.table import tell_missing
from lowvram.results.terminal import shown_path, tell

FILE_NAME = "report.html"
FIGURES = "figures"
PAGE = Path(__file__).parent / "page"
SCRIPTS = (
    "elements",
    "scale",
    "tooltip",
    "summary",
    "scatter",
    "effects",
    "waterfall",
    "kinds",
    "losses",
    "batch_size",
    "over_step",
    "table",
    "main",
)
# Escaped, so that no text in the JSON can end the <script> element that holds it.
_ENDS_AN_ELEMENT = str.maketrans({mark: f"\\u{ord(mark):04x}" for mark in "<>&\u2028\u2029"})


def save(folder: Path) -> Path | None:
    """Writes the report of the sweep in `folder` beside its table; None if there is no row yet."""
    points = entries([folder])
    return write(folder, points) if points else None


def write(folder: Path, points: Sequence[Entry]) -> Path:
    """Writes the report of these points in `folder`, in one move."""
    path = folder / FILE_NAME
    write_text(path, page(evidence(points)))
    return path


def page(shown: Evidence) -> str:
    """The whole HTML file."""
    style = (PAGE / "report.css").read_text(encoding="utf-8")
    script = "".join((PAGE / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    return Template((PAGE / "report.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(shown["title"]),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=to_json(shown).translate(_ENDS_AN_ELEMENT),
    )


def _hash(text: str) -> str:
    """For the page's content security policy, which allows only this script and style."""
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes report.html of one sweep, or one of several; with --png also PNGs for papers. Exits with 3 on failure."""
    parser = argparse.ArgumentParser("python -m lowvram.report", description=main.__doc__)
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path, help="a sweep's folder, or that of a run")
    parser.add_argument("--png", action="store_true", help=f"also PNGs, in {FIGURES}/ beside the report")
    parser.add_argument("--to", metavar="FOLDER", type=Path, help="where to write it; needed for several sweeps")
    typed = parser.parse_args(arguments)
    try:
        for path in _written(typed.folders, typed.to, typed.png):
            tell(f"report: {shown_path(path)}")
    except Refused as error:
        tell(str(error), sys.stderr)
        return 3
    return 0


def _written(folders: Sequence[Path], to: Path | None, wants_png: bool) -> list[Path]:
    """Writes the report, and PNGs if wanted; returns their paths."""
    for folder in folders:
        if not folder.is_dir():
            raise Refused(f"{folder} is not a folder: name the folder of a sweep or of a run")
        if not entries([folder]):
            raise Refused(f"{folder} holds no {ROW_FILE}, neither itself nor one folder deeper")
        tell_missing(folder)
    if to is None and len(folders) > 1:
        raise Refused("several sweeps make one report: name its folder with --to FOLDER")
    target = to or folders[0]
    target.mkdir(parents=True, exist_ok=True)
    points = entries(folders)
    paths = [write(target, points)]
    if wants_png:
        from lowvram.results.report.figures import save_figures

        paths += save_figures(target / FIGURES, evidence(points))
    return paths
