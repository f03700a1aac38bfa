"""Processes side by side, each with a device of its own, that take one piece of work after another. Imports no torch.

A process that dies loses the work that it has; another one takes the next.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any, Final, Self, cast, final

from lowvram.config.errors import BadInput, Refused
from lowvram.launch.client import Server
from lowvram.launch.process_tree import stop_with_parent

AUTO, ONE = "auto", "1"
CARDS, THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
Slots = Sequence[str | None]  # the device of each process, as CUDA_VISIBLE_DEVICES names it; None: the CPU


def slots_for(jobs: str, cards: Sequence[str]) -> Slots:
    """The devices of processes that run side by side.

    Args:
        cards: those that are visible, as CUDA_VISIBLE_DEVICES names them; empty where points run on the CPU.

    Raises:
        BadInput: there are fewer cards than jobs.
    """
    if jobs == AUTO:
        return list(cards) or [None]
    if cards and int(jobs) > len(cards):
        raise BadInput("jobs", jobs, f"at most {len(cards)}, the number of visible cards: two points would share one")
    return list(cards[: int(jobs)]) or [None] * int(jobs)


def cards_in(answer: Mapping[str, Any], jobs: str) -> list[str]:
    """The cards that a process has listed for points side by side. Raises Refused if it died without an answer: points
    would then share a card."""
    if jobs != ONE and "cards" not in answer:
        raise Refused(f"jobs={jobs}: the process that lists the cards was killed from outside: type the same again")
    return answer.get("cards", [])


@final
class Died:
    """Instead of a result: the process was killed."""


DIED: Final = Died()


@final
@dataclass(frozen=True, eq=False)
class Worker:
    """A process, and the pipe to it."""

    process: BaseProcess
    pipe: Any  # a Connection
    slot: str | None


@final
class Pool:
    """The processes, each started for its first work. As a context it ends them: those that still work, after that.

    Args:
        task: does one piece of work, in a process; pickled for each of them.
        held: descriptors of locked files that they keep open as long as they live, see results/files/claim.py; `task`
            gets them with each piece of work.
    """

    def __init__(self, slots: Slots, task: Callable[[Any, Sequence[int]], Any], held: Sequence[int] = ()) -> None:
        self._slots, self._task, self._held = slots, task, held
        self._unused, self._idle = list(reversed(slots)), list[Worker]()
        self._running = dict[Any, tuple[Worker, Any]]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._idle:
            worker.pipe.close()
            worker.process.join()
        for worker, _ in self._running.values():  # the user has left: it ends after its work
            worker.pipe.close()

    @property
    def num_idle(self) -> int:
        return len(self._unused) + len(self._idle)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def give(self, work: Any) -> None:
        """Hand work to a process that has none."""
        worker = self._idle.pop() if self._idle else self._start(self._unused.pop())
        try:
            worker.pipe.send(work)
        except OSError:  # it was killed while it had none
            worker.process.join()
            worker = self._start(worker.slot)
            worker.pipe.send(work)
        self._running[worker.pipe] = worker, work

    def ended(self) -> list[tuple[Any, Any]]:
        """Wait until some work has ended; returns each piece, and its result or DIED."""
        ended = list[tuple[Any, Any]]()
        for pipe in cast(list[Any], wait(list(self._running))):
            worker, work = self._running.pop(pipe)
            try:
                ended.append((work, pipe.recv()))
                self._idle.append(worker)
            except (EOFError, OSError):
                worker.process.join()
                self._unused.append(worker.slot)
                ended.append((work, DIED))
        return ended

    def _start(self, slot: str | None) -> Worker:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        arguments = theirs, self._task, Held(self._held), slot, len(self._slots)
        process = context.Process(target=work, args=arguments, daemon=True)
        process.start()
        theirs.close()  # so that the pipe ends with the process
        return Worker(process, ours, slot)


class Held:
    """Descriptors, which a process that is started gets as its own."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.fds = fds

    def __reduce__(self) -> tuple[Any, ...]:
        return received, tuple(map(DupFd, self.fds))


def received(*sent: Any) -> Held:
    return Held([fd.detach() for fd in sent])


def work(pipe: Any, task: Callable[[Any, Sequence[int]], Any], held: Held, slot: str | None, num: int) -> None:
    """In a process of its own: work until there is no more. It is asked to stop when the program dies."""
    stop_with_parent()
    if has_lost_parent():
        return
    os.environ.setdefault(THREADS, str(max(1, len(os.sched_getaffinity(0)) // num)))
    if slot is not None:
        os.environ[CARDS] = slot
    elif num > 1:
        Server.disturbs = f"jobs={num}: other points ran on this CPU at the same time"
    while True:
        try:
            given = pipe.recv()
        except (EOFError, OSError):  # there is no more, or the program is gone
            return
        pipe.send(task(given, held.fds))


def has_lost_parent() -> bool:
    """Whether the program died while this process started: its pipe may still hold work."""
    parent = multiprocessing.parent_process()
    return parent is not None and os.getppid() != parent.pid
