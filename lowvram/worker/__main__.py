"""`python -m lowvram.worker FOLDER`: runs the point that a folder's `spec.json` describes, or goes on with it.

Anything that starts a command can run it so: alone, or as one of many ranks with the environment variables that
torchrun sets. It tells no loggers and no callbacks: whoever follows the folder does.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lowvram.config.code_names import code_of
from lowvram.config.errors import BadInput
from lowvram.config.exit_codes import EXIT_REFUSED
from lowvram.config.words import typed_value
from lowvram.launch.client import LIBRARIES
from lowvram.launch.events import opened, opened_anew
from lowvram.launch.spec import NoSpec, PointSpec
from lowvram.launch.streams import protect_streams
from lowvram.launch.supervisor import WORKER, Outlets
from lowvram.launch.torchrun import launch_from
from lowvram.results import row as rows
from lowvram.results.files.run_folder import Claim, Kind, has_snapshots
from lowvram.results.terminal import shown_path
from lowvram.runs.hydra_notes import own_notes_in
from lowvram.runs.own_runs import check_code

STDOUT = 1
USAGE = "usage: python -m lowvram.worker FOLDER [trust=FOLDER]"


def main(words: Sequence[str]) -> int:
    """Run the point in the folder that was typed; returns the exit code."""
    if not words or any(word.startswith("-") for word in words):
        print(USAGE, file=sys.stderr)
        return EXIT_REFUSED
    folder, launch = Path(words[0]).absolute(), launch_from()
    is_first = launch is None or launch.rank == 0
    try:
        spec = checked(folder, typed_value(list(words), "trust"))
        claim = Claim(folder, Kind.RUN, "FOLDER") if is_first else None
    except (BadInput, NoSpec, OSError) as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    try:
        if claim is not None:
            row = rows.read(folder)
            if row is not None and rows.is_final(row) and not claim.was_cut_off:
                print(f"{shown_path(folder)}: has its result already: {row['status']}")
                return rows.exit_code([row], sweep=False)
            replace(spec, is_resumed=has_snapshots(folder), run=claim.run).write()
        fds = opened_anew(folder) if is_first else (opened(folder),)
        os.environ |= {**LIBRARIES, **os.environ}  # before torch is imported
        worker = importlib.import_module(WORKER)
        request = {"folder": str(folder), "hidden": [], "launch": launch and vars(launch), "is_alone": True}
        code = worker.main(request, Outlets(STDOUT, fds[0]), 0, -1)
        if is_first and (row := rows.read(folder)) is not None:
            print(": ".join(filter(None, [shown_path(folder), row["status"], row["reason"]])))
        return code
    finally:
        if claim is not None:
            claim.release()


def checked(folder: Path, trust: str | None) -> PointSpec:
    """The specification in a folder.

    Args:
        trust: what was typed for `trust`.

    Raises:
        BadInput: it names code to run, and isn't this user's own.
        NoSpec: it is damaged, or there is none.
    """
    try:
        spec = PointSpec.read(folder)
    except OSError as error:
        raise NoSpec(f"{shown_path(folder)}: its spec.json, which each run leaves: {error.strerror}") from None
    check_code(code_of(spec.config), folder, "FOLDER", own_notes_in(folder)[1], trust)
    return spec


if __name__ == "__main__":
    protect_streams()
    sys.exit(main(sys.argv[1:]))
