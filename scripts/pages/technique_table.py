"""docs/techniques.md: each technique's memory by kind, speed, fidelity and effort, and the field's claims beside them.

    scripts/python scripts/pages/technique_table.py                   writes the page, out of the rows in docs/results
    scripts/python scripts/pages/technique_table.py --check           1 if the page is not what these rows say
    scripts/python scripts/pages/technique_table.py --keep FOLDER...  keeps the sweeps in these folders, writes the page

`--before` is what stood before the sweeps' commands, such as "taskset -c 1 env OMP_NUM_THREADS=1"; `--device` the
folder of docs/results that they belong to. The sweeps are one_at_a_time, waterfall, sharding and batch_size, each of
one model; what isn't there yet is named as not measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lowvram.config.errors import Refused
from lowvram.config.identity import ROOT
from lowvram.results.files.durable import write_text
from scripts.pages.technique_page import page
from scripts.pages.technique_rows import RESULTS, keep, sweeps

PAGE = ROOT / "docs" / "techniques.md"


def main(arguments: Sequence[str] | None = None, results: Path = RESULTS, target: Path = PAGE) -> int:
    """Writes the page, or looks whether it is what the rows say."""
    parser = argparse.ArgumentParser("technique_table.py", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the page differs")
    parser.add_argument("--keep", metavar="FOLDER", nargs="+", type=Path, default=[], help="sweeps to keep first")
    parser.add_argument("--before", default="", help="what stood before their commands")
    parser.add_argument("--device", default="cpu", help="where in docs/results they are kept")
    typed = parser.parse_args(arguments)
    try:
        for folder in typed.keep:
            print(f"kept: {keep(folder, results / typed.device, typed.before)}")
    except Refused as error:
        print(error, file=sys.stderr)
        return 3
    text = page(sweeps(results))
    if not typed.check:
        write_text(target, text)
    elif not target.is_file() or target.read_text(encoding="utf-8") != text:
        print(
            f"{target.name} isn't what its rows say: run scripts/python scripts/pages/technique_table.py",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
