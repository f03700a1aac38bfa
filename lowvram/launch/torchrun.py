"""This program's rank, from the environment: under torchrun each rank is a program of its own. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from lowvram.launch.process_tree import stop_with_parent

AGENT = "TORCHELASTIC_RUN_ID"  # set if the parent is an agent of torchrun
WORDS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """One rank among several programs."""

    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int

    @property
    def records(self) -> bool:
        """Whether this program writes the results; only rank 0's does."""
        return self.rank == 0

    @property
    def is_beside_first(self) -> bool:
        """Whether rank 0 is on this machine. torchrun numbers the ranks of a machine one after another."""
        return self.rank == self.local_rank


def launch_from(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """The rank that torchrun gave this program; None if torchrun didn't start it."""
    if not all(environment.get(word) for word in WORDS):
        return None
    rank, num_ranks, local_rank = (int(environment[word]) for word in WORDS[:3])
    return Launch(rank, num_ranks, local_rank, int(environment.get("LOCAL_WORLD_SIZE", num_ranks)))


def end_with_agent(environment: Mapping[str, str] = os.environ) -> None:
    """Under torchrun: be asked to stop when its agent on this machine dies, which would leave this rank, and the others
    that wait for it, to nobody."""
    if AGENT in environment:
        stop_with_parent()


def is_ended_with_first(launch: Launch, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether whoever started this program may end rank 0's when this one fails: an agent of torchrun does so on its
    own machine, Slurm's srun on all of them."""
    return launch.is_beside_first or AGENT not in environment


@contextmanager
def aside(launch: Launch | None) -> Iterator[Path | None]:
    """Inside the block, a rank that doesn't record prints nothing and writes only to the temporary folder that is
    yielded. On the rank that records, None is yielded and nothing changes."""
    if launch is None or launch.records:
        yield None
        return
    with (
        TemporaryDirectory(prefix=f"lowvram-rank-{launch.rank}-") as folder,
        Path(os.devnull).open("w", errors="backslashreplace") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        yield Path(folder)
