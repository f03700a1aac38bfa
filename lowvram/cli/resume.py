"""resume=last and resume=FOLDER: restores the command line of the run to be continued. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from lowvram.config.code_names import code_in
from lowvram.config.defaults import CONF
from lowvram.config.errors import BadInput
from lowvram.config.identity import name_device
from lowvram.config.registry import node_of, options_of
from lowvram.config.words import key, typed_value
from lowvram.results import row as rows
from lowvram.results.files.run_folder import SNAPSHOTS, has_snapshots, is_running, snapshots_in, was_cut_off
from lowvram.results.terminal import hydra_quoted, tell
from lowvram.runs.hydra_notes import change_in, check_secrets, own_words_of
from lowvram.runs.own_runs import check_code
from lowvram.runs.submission import Submission

MULTIRUN = ("-m", "--multirun")
LAUNCHER = "launcher"


def moved(words: list[str], folder: Path) -> list[str]:
    """The same run, in another folder."""
    kept = [word for word in words if key(word) != "hydra.run.dir"]
    return [*kept, f"hydra.run.dir={hydra_quoted(str(folder))}"]


def with_resumed(words: list[str], wanted: str) -> list[str]:
    """The words of the command line, those of the resumed run before those that were typed, which win.

    Args:
        wanted: what was typed for `resume`.

    Raises:
        BadInput: there is nothing to continue, or the run isn't this user's and names code.
        HydraException: a word that can't be read.
    """
    if not set(words).isdisjoint(MULTIRUN):
        raise BadInput("resume", wanted, "typed without -m: a sweep goes on with the same command and hydra.sweep.dir")
    folder = newest_unfinished(words) if wanted == "last" else Path(wanted).expanduser()
    submission = Submission.read(folder)
    if not has_snapshots(folder) and submission is None:
        raise BadInput("resume", wanted, "last or the folder of a training run that left a snapshot")
    name_device(submission and submission.device)
    typed = [word for word in words if key(word) != "resume"]
    where = hydra_quoted(str(folder.resolve()))
    # One run, also if a preset of its words makes a sweep.
    there = [f"resume={where}", f"hydra.run.dir={where}", "hydra.mode=RUN"]
    if Submission.of_this_job(folder) is not None:  # its script has all words
        return [*typed, *there]
    taken = {"resume", "trust", *map(key, typed)}
    earlier, own = own_words_of(folder)
    if (note := change_in(folder)) is not None:
        tell(note)
    kept = [word for word in earlier if key(word) not in taken and not is_of_another_option(word, typed)]
    kept = [word for word in kept if key(word).partition(".")[0] != LAUNCHER]  # who runs it is of one call
    check_code(code_in(kept), folder, "resume", own, typed_value(words, "trust"))
    check_secrets(kept, folder)
    return [*kept, *typed, *there]


def is_of_another_option(word: str, typed: list[str]) -> bool:
    """Whether a word of the resumed run sets a field that the option typed for its group doesn't have."""
    group, _, field = key(word).partition(".")
    if not field or not (CONF / group).is_dir():
        return False
    option = typed_value(typed, group)
    return option in options_of(group) and field.partition(".")[0] not in node_of(group, str(option))


def newest_unfinished(words: list[str]) -> Path:
    """The run below the outputs folder with the newest snapshot that isn't finished, and that doesn't run now."""
    outputs = typed_value(words, "paths.outputs") or "outputs"
    snapshots = (path for folder in Path(outputs).glob(f"**/{SNAPSHOTS}") for path in snapshots_in(folder))
    newest_first = sorted(snapshots, key=lambda file: file.stat().st_mtime, reverse=True)
    for folder in dict.fromkeys(file.parent.parent for file in newest_first):
        row = rows.read(folder)
        is_finished = row is not None and rows.is_final(row) and not was_cut_off(folder)
        if not is_finished and not is_running(folder):
            return folder
    raise BadInput(
        "resume", "last", f"a folder: no unfinished run below {outputs} has a snapshot and isn't running now"
    )
