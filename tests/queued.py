"""Points that were handed to a queue of jobs: what their folders tell of them."""

from __future__ import annotations

from pathlib import Path

from lowvram.runs.submission import Submission
from tests.calls import Outcome, wait_until


def job_in(folder: Path) -> str:
    """The queue's own name of the job that was submitted last."""
    submission = Submission.read(folder)
    assert submission is not None
    assert submission.job is not None
    return submission.job


def log_of(folder: Path) -> str:
    """What the jobs of a folder have printed."""
    path = folder / "queue_job.log"
    return path.read_text() if path.exists() else "no log"


def by_name(outcome: Outcome) -> dict[str, Path]:
    """The folders of a call's points that were submitted, by the points' names."""
    submissions = {path: Submission.read(path) for path in outcome.folders}
    return {found.name: path for path, found in submissions.items() if found is not None}


def wait_for_steps(folder: Path, num: int) -> None:
    path = folder / "metrics.jsonl"

    def is_there() -> bool:
        return path.exists() and len(path.read_text().splitlines()) >= num

    try:
        wait_until(is_there, f"{num} steps of {folder}", 400)
    except AssertionError as error:
        error.add_note(f"its job's log: {log_of(folder)}")
        raise
