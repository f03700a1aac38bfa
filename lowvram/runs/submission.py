"""Beside a point that was handed to a queue (launcher=slurm or ray): which job runs it, and what the point is called.
Imports no torch.

The record is on disk before the queue gets the job, and again once it has told the job's number. If the program dies in
between, the job is found by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, final

from lowvram.launch.launcher import own_token
from lowvram.results.files.durable import write_text
from lowvram.results.files.regular import SHORT_BYTES, read_regular
from lowvram.results.files.run_folder import EARLIER_JOB_FILES, JOB_RECORD
from lowvram.results.files.sealed import opened, sealed


@final
@dataclass(frozen=True)
class Submission:
    """A point that was handed to a queue.

    Attributes:
        queue: the option of the launcher.
        token: no two submissions share one; the job has it in its environment.
        job_name: as the queue shows it.
        id, name, index, logged: of the point, as in its row.
        device: the device that the point's id names: which one will run it isn't known before.
        sweep: the name of its sweep; None: a single run.
        job: the id that the queue has told; None: it hasn't.
    """

    queue: str
    token: str
    job_name: str
    id: str
    name: str
    index: int
    logged: Mapping[str, str | None]
    device: str
    sweep: str | None = None
    job: str | None = None

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """That of the point in a folder; None if there is none, or it can't be read."""
        for name, more in ((JOB_RECORD, {}), (EARLIER_JOB_FILES[0], {"queue": "slurm"})):
            with suppress(OSError, ValueError, TypeError):
                (folder / name).lstat()  # usually there is none
                return cls(**more, **json.loads(opened(read_regular(folder / name, SHORT_BYTES).decode())))
        return None

    @classmethod
    def of_this_job(cls, folder: Path) -> Self | None:
        """That of the point in a folder, if this process is its job."""
        found = cls.read(folder)
        return found if found is not None and own_token() == found.token else None

    def write(self, folder: Path) -> None:
        write_text(folder / JOB_RECORD, sealed(json.dumps(asdict(self), indent=1), "\n "))


def device_in(sweep: Path) -> str | None:
    """The device that the ids of a sweep's points name, if some were handed to a queue."""
    found = (Submission.read(path.parent) for path in sorted(sweep.glob("*/*_job.json")))
    return next((each.device for each in found if each is not None), None)
