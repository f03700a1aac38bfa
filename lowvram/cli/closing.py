"""The end of a call: prints the rows that the points left on disk, and derives the exit code. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from lowvram.cli.call import Call
from lowvram.cli.initial import words_to_train_on
from lowvram.cli.job import Ending
from lowvram.config.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED
from lowvram.config.transforms import is_transform
from lowvram.config.words import key
from lowvram.launch.stop import stop_signals
from lowvram.launch.torchrun import Launch
from lowvram.results import row as rows
from lowvram.results import table
from lowvram.results.files.run_folder import is_running
from lowvram.results.loggers import wandb_sweep
from lowvram.results.loggers.wandb import sync_command
from lowvram.results.report import report
from lowvram.results.row import Row, Status
from lowvram.results.terminal import command_line, hydra_quoted, shown_path, summary, tell
from lowvram.runs.folders import end_runs
from lowvram.runs.hydra_notes import is_own


def close_run(endings: Collection[Ending], launch: Launch | None, words: Sequence[str]) -> int:
    """Print the result of a single run; returns the exit code. A refused run leaves no files."""
    if any(ending.place for ending in endings):
        end_runs(is_refused=False)
        return 0
    ran = next(((ending, row) for ending in endings if (row := ending.read_row()) is not None), None)
    end_runs(is_refused=ran is None or ran[1]["status"] == Status.INCOMPATIBLE)
    if ran is None:
        return EXIT_INTERRUPTED if stop_signals() else 0
    ending, row = ran
    if row["status"] == Status.INCOMPATIBLE:
        tell(row["reason"], sys.stderr)
    else:
        ranks = [f"sharding.ranks={launch.num_ranks}"] if launch else []  # torchrun isn't part of the command
        again = words_of_resumed(words) if ending.row else []  # else they are in its folder
        trust = [] if is_own(ending.folder) else [f"trust={hydra_quoted(shown_path(ending.folder))}"]
        print("\n".join(summary(row, ending.folder, [*again, *ranks, *trust])))
        if is_transform(row["choices"]) and row["status"] == Status.OK:
            tell(f"train on with: {command_line(*words_to_train_on(ending.folder, words))}")
        if launch and not launch.records and Status(row["status"]).exit_single == EXIT_FAILED:
            tell(
                f"rank {launch.rank}: {row['status']}: {row['reason']}", sys.__stderr__
            )  # the one that records may not
    return EXIT_INTERRUPTED if stop_signals() else rows.exit_code([row], sweep=False)


def words_of_resumed(words: Sequence[str]) -> list[str]:
    """What was typed beside resume=; nothing for another run."""
    is_resumed = "resume" in map(key, words)
    return [word for word in words if is_resumed and key(word) not in ("resume", "trust", "hydra.run.dir")]


def close_sweep(call: Call, words: Sequence[str]) -> int:
    """Print the table of a sweep, and how to go on; returns the exit code."""
    for index, ending in call.endings.items():
        if ending.holder and is_finished(ending.folder):  # another program ran it then, and has ended
            call.endings[index] = replace(ending, holder=None, is_kept=True)
    endings = call.endings.values()
    others = held_by_others(endings)
    for ending in others:
        tell(f"{shown_path(ending.folder)}: {ending.holder} runs it: type this again to see its row")
    finished = show_sweep(call, words)
    if call.failure:
        tell(call.failure, sys.stderr)
    if stop_signals() or others:
        return EXIT_INTERRUPTED
    code = EXIT_FAILED if call.failure else rows.exit_code(finished, sweep=True)
    may_run = any(ending.place for ending in endings)
    return 0 if code == EXIT_REFUSED and may_run else code


def is_finished(folder: Path) -> bool:
    """Whether a point has a final row, and nobody runs it."""
    row = rows.read(folder)
    return row is not None and rows.is_final(row) and not is_running(folder)


def held_by_others(endings: Collection[Ending]) -> list[Ending]:
    """The endings of points that other programs run. If two points of a sweep are the same one, as with name=a,b, and
    run side by side, the holder was a job of this call, which has ended by now: those are left out."""
    ours = {ending.folder for ending in endings if not ending.holder}
    return [ending for ending in endings if ending.holder and ending.folder not in ours]


def show_sweep(call: Call, words: Sequence[str]) -> list[Row]:
    """Print the table, where the results are, and how to upload and continue; returns the rows. Without rows, the sweep
    leaves no files."""
    assert call.sweep is not None
    folder, endings = call.sweep.path, call.endings.values()
    for ending in endings:
        if ending.is_stopped or ending.refusal:
            call.sweep.forget(ending.folder)
    by_ending = [(ending, row) for ending in endings if (row := ending.read_row()) is not None]
    finished = table.collect(folder) if call.failure else [row for _, row in by_ending]
    num_queued = sum(ending.place is not None for ending in endings)
    if not finished and not num_queued:
        call.sweep.undo()
        return []
    if finished:
        show_rows(folder, finished, {row["id"] for ending, row in by_ending if ending.is_kept})
    for line in [] if stop_signals() or not finished else wandb_sweep.record(folder, call.logger):
        tell(line)
    if any(folder.glob("*/wandb/offline-run-*")):
        tell(f"to upload: {sync_command(folder)}")
    kept = [word for word in words if not word.startswith("hydra.sweep.dir=")]
    again = command_line(*kept, f"hydra.sweep.dir={hydra_quoted(shown_path(folder))}")
    if num_queued:
        tell(f"{num_queued} of {len(endings)} points are in the queue")
        tell(f"to see their rows and submit what is missing: {again}")
    elif call.failure or stop_signals() or any(map(rows.is_missing, finished)):
        tell(f"to run what is missing: {again}")
    return finished


def show_rows(folder: Path, finished: Sequence[Row], kept: Collection[str]) -> None:
    """Print the table of a sweep's rows, and save it in its folder with the report.

    Args:
        kept: the ids of those that an earlier call has finished.
    """
    table.save(folder, table.collect(folder))
    print(table.render(finished, sys.stdout, kept=set(kept)))
    report.save(folder)
    tell(f"results: {shown_path(folder)} (report.html, table.md, table.csv, rows.jsonl)")
