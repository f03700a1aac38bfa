"""`python -m lowvram.worker FOLDER`: runs the point that a folder's `spec.json` describes, or goes on with it.

Anything that starts a command can run it so: alone, or as one of many ranks with the environment variables that
torchrun sets. It calls no loggers and no callbacks, and has no time limit: the program that follows a run does that.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowvram.config.code_names import code_of
from lowvram.config.errors import BadInput
from lowvram.config.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED
from lowvram.config.settings import CHILDS_OWN
from lowvram.config.words import typed_value
from lowvram.launch.client import LIBRARIES
from lowvram.launch.events import opened, opened_anew
from lowvram.launch.spec import NoSpec, PointSpec
from lowvram.launch.streams import protect_streams
from lowvram.launch.supervisor import WORKER, Outlets
from lowvram.launch.torchrun import Launch, end_with_agent, launch_from
from lowvram.results import row as rows
from lowvram.results.files.run_folder import has_snapshots, was_cut_off
from lowvram.results.terminal import shown_path
from lowvram.runs.folders import claimed
from lowvram.runs.hydra_notes import own_notes_in
from lowvram.runs.own_runs import check_code

STDOUT = 1
LEFT_OUT = ("timeout_s", "measure.fidelity", "callbacks")  # keys of what only the program that follows a run does
USAGE = "usage: python -m lowvram.worker FOLDER [trust=FOLDER]"


def main(words: Sequence[str]) -> int:
    """Run the point in the folder that was typed; returns the exit code."""
    if not words or any(word.startswith("-") for word in words):
        print(USAGE, file=sys.stderr)
        return EXIT_REFUSED
    folder = Path(words[0]).absolute()
    try:
        spec = checked(folder, typed_value(list(words), "trust"))
        return run_in(spec, launch_from())
    except (BadInput, NoSpec) as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:  # while another machine's program was watched
        return EXIT_INTERRUPTED
    except OSError as error:
        print(f"{error.filename or shown_path(folder)}: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED


def run_in(spec: PointSpec, launch: Launch | None) -> int:
    """Run the point, unless its folder holds its result; returns the exit code.

    Raises:
        BadInput: another program runs it.
        OSError: its folder can't be written.
    """
    folder, is_first = spec.folder, launch is None or launch.rank == 0
    row = rows.read(folder)
    if row is not None and rows.is_final(row) and not was_cut_off(folder):
        if is_first:
            print(f"{shown_path(folder)}: has its result already: {row['status']}")
        return rows.exit_code([row], sweep=False)
    claim = claimed(folder, "FOLDER") if is_first else None
    try:
        changes = {} if claim is None else {"is_resumed": has_snapshots(folder), "run": claim.run}
        fence = None if claim is None else claim.fence
        fds = opened_anew(folder) if is_first else (opened(folder),)
        for name in LEFT_OUT if is_first else ():
            if has_value(spec.config, name):
                print(f"{name} is left out: train.py does it, and nobody follows this run")
        os.environ |= {**LIBRARIES, **os.environ}  # before torch is imported
        worker = importlib.import_module(WORKER)
        about = {"folder": str(folder), "hidden": [], "launch": launch and vars(launch), "fence": fence}
        code = worker.main({**about, "is_alone": True, "changes": changes}, Outlets(STDOUT, fds[0]), 0, -1)
        if is_first and (row := rows.read(folder)) is not None:
            print(": ".join(filter(None, [shown_path(folder), row["status"], row["reason"]])))
        return code
    finally:
        if claim is not None:
            claim.release()


def has_value(config: Mapping[str, Any], name: str) -> bool:
    """Whether a dotted key is set."""
    value: Any = config
    for key in name.split("."):
        value = value[key]
    return bool(value)


def checked(folder: Path, trust: str | None) -> PointSpec:
    """The specification in a folder.

    Args:
        trust: what was typed for `trust`.

    Raises:
        BadInput: it names code to run, and isn't this user's own.
        NoSpec: it is damaged, an earlier version's, or there is none.
    """
    try:
        spec = PointSpec.read(folder)
    except OSError as error:
        raise NoSpec(f"{shown_path(folder)}: its spec.json, which each run leaves: {error.strerror}") from None
    check_code(code_of(spec.config), folder, "FOLDER", own_notes_in(folder)[1], trust)
    if unknown := [name for name in CHILDS_OWN if name not in spec.config]:
        what = f"its spec.json was written by a version of lowvram without {', '.join(unknown)}"
        raise NoSpec(f"{shown_path(folder)}: {what}: python train.py resume={shown_path(folder)} goes on with it")
    return spec


if __name__ == "__main__":
    protect_streams()
    end_with_agent()
    sys.exit(main(sys.argv[1:]))
