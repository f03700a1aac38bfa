"""launcher=OPTION: whether a point runs here, or is handed to a queue that runs it elsewhere. Imports no torch."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from lowvram.config.errors import Refused

TOKEN = "LOWVRAM_SUBMITTED"  # in the environment of a job: which submission it belongs to
LONGEST_NAME = 60  # characters of a job's name
_own = [""]


def note_token() -> None:
    """At the start of the program: learn whether it is a job. What it starts is none."""
    _own[0] = os.environ.pop(TOKEN, "")


def own_token() -> str:
    """Which submission this program belongs to, as its job; empty: to none."""
    return _own[0]


class Unsure(Refused):
    """The queue hasn't said whether it has taken a job."""


@final
@dataclass(frozen=True)
class Queued:
    """A job that waits or runs.

    Attributes:
        name: as it was submitted; no two submissions share one.
        state: in the queue's own words.
    """

    id: str
    name: str
    state: str


@final
@dataclass(frozen=True)
class Work:
    """What a job is to do.

    Attributes:
        name: of the job.
        token: names the submission, in the job's environment.
        folder: of the point; the job's files are in it.
        command: the words of the command that runs the point, or goes on with it.
        cwd: the folder that the command's relative paths start from.
    """

    name: str
    token: str
    folder: Path
    command: Sequence[str]
    cwd: Path


class Queue(ABC):
    """Runs jobs on other machines, also after this program has ended."""

    label: str  # for messages
    option: str  # as in launcher=OPTION
    variables: str  # for a message: how a job gets a variable of the environment

    @abstractmethod
    def check(self) -> None:
        """Raises Refused, or BadInput, if nothing can be submitted from here."""

    @abstractmethod
    def submit(self, work: Work) -> str:
        """Write the job's files and submit it; returns its id.

        Raises:
            Refused: the queue doesn't take it (Unsure: or perhaps it does).
        """

    @abstractmethod
    def jobs(self) -> Sequence[Queued]:
        """The user's jobs that wait or run. Raises Refused if the queue doesn't answer."""

    def how_ended(self, job: str) -> str:
        """What the queue says of the end of a job, in one line; empty if it doesn't say."""
        return ""


def job_name(point: str, token: str) -> str:
    """A name that queues show whole, and that no other submission has."""
    return f"{re.sub(r'[^A-Za-z0-9.+_-]', '_', point)[: LONGEST_NAME - len(token) - 1]}-{token}"


@final
@dataclass(frozen=True)
class Local:
    """conf/launcher/local.yaml."""


Launcher = Local | Queue
