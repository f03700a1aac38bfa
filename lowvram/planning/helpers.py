"""Copies of this process that plan points side by side.

A plan keeps one core busy with Python code, so several processes are as many times as fast. What is known before they
are made (opened data) they know as well; what one of them learns (traces) it keeps for the points that it is given
later, and shares with the others through the cache on disk.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pickle import PickleError
from socket import socketpair
from types import TracebackType
from typing import Any, NamedTuple, Protocol, final

import torch

from lowvram.core.free_memory import free_host_bytes

MOST = 8  # copies: each takes memory, and a search seldom has more plans to make at once
BYTES_EACH = 2**30  # of the host's memory: about 0.4 GiB for models of 8 billion parameters
# What sending an object by pickle may raise, if some class in it is a user's own.
CANT_BE_SENT = (PickleError, AttributeError, TypeError, ValueError, RecursionError, ImportError)


class Job(Protocol):
    """What a helper is given: can be pickled."""

    @property
    def kind(self) -> str:
        """The same for jobs that share traces."""
        ...


class Answered(NamedTuple):
    """What a helper sends back."""

    is_done: bool  # False: an unexpected error, or what can't be sent; this process then tries itself
    answer: Any
    printed: str


@final
class Helpers:
    """Copies of this process, each of which answers one job at a time. With none, this process answers.

    They see no card: a process that has used CUDA can't be copied, so make them before, and give them no job that needs
    one. They end with this process, or at the end of the `with` block.

    Args:
        num: how many.
        answer: answers a job. It returns the errors that are expected.
    """

    def __init__(self, num: int, answer: Callable[[Any], Any]) -> None:
        self.answer, self.said = answer, set[str]()
        self.kinds: dict[Connection, set[str]] = {}  # by helper the kinds of jobs that it has had
        self.processes: list[Any] = []
        context = get_context("fork")
        for _ in range(num):
            ours, theirs = (Connection(end.detach()) for end in socketpair())
            others = [*self.kinds, ours]
            process = context.Process(target=serve, args=(theirs, others, answer), daemon=True)
            process.start()
            theirs.close()
            self.kinds[ours] = set()
            self.processes.append(process)

    def __enter__(self) -> Helpers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the helpers, whatever they are doing."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for connection in self.kinds:
            connection.close()
        self.processes, self.kinds = [], {}

    @property
    def num(self) -> int:
        return len(self.kinds)

    def answers(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Any]]:
        """The answers as they come, each with the index of its job."""
        left, busy = dict(enumerate(jobs)), dict[Connection, int]()
        try:
            while left or busy:
                for helper in [each for each in self.kinds if each not in busy]:
                    if left:
                        index = self.next(helper, left)
                        if self.gave(helper, left[index]):
                            busy[helper] = index
                            del left[index]
                        else:
                            yield index, self.answer(left.pop(index))
                if not self.kinds:
                    for index in [*left]:
                        yield index, self.answer(left.pop(index))
                for helper in wait([*busy]) if busy else ():
                    assert isinstance(helper, Connection)
                    index = busy.pop(helper)
                    answered = self.received(helper)
                    yield index, answered.answer if answered.is_done else self.answer(jobs[index])
        finally:
            if busy:  # nobody waits for their answers any more
                self.close()

    def next(self, helper: Connection, left: dict[int, Job]) -> int:
        """The job that a helper is given: of a kind that it has had, else of one that none has had."""
        had_by_any = set[str]().union(*self.kinds.values())
        for kinds, is_had in ((self.kinds[helper], True), (had_by_any, False)):
            for index, job in left.items():
                if (job.kind in kinds) == is_had:
                    return index
        return next(iter(left))

    def gave(self, helper: Connection, job: Job) -> bool:
        """Send a job; False if that isn't possible."""
        try:
            helper.send(job)
        except OSError:
            self.lose(helper)
            return False
        except CANT_BE_SENT:
            return False
        self.kinds[helper].add(job.kind)
        return True

    def received(self, helper: Connection) -> Answered:
        """What a helper has sent. What it printed is printed here, each line once, whichever helper prints it."""
        try:
            answered: Answered = helper.recv()
        except (EOFError, OSError):  # it was killed, as by the kernel where memory runs out
            self.lose(helper)
            return Answered(False, None, "")
        for line in answered.printed.splitlines() if answered.is_done else ():
            if line not in self.said:
                self.said.add(line)
                print(line)
        return answered

    def lose(self, helper: Connection) -> None:
        helper.close()
        del self.kinds[helper]


def num_helpers(num_jobs: int) -> int:
    """How many helpers this process should have for so many jobs; 0 where it answers itself: one job or one core, a
    platform where a process can't be copied safely, or a process that has threads."""
    if sys.platform != "linux" or threading.active_count() > 1:
        return 0
    num = min(MOST, num_jobs, len(os.sched_getaffinity(0)), free_host_bytes() // BYTES_EACH)
    return num if num > 1 else 0


def serve(connection: Connection, others: Sequence[Connection], answer: Callable[[Any], Any]) -> None:
    """A helper's life: it ends when this process's parent does.

    Args:
        others: the parent's ends of the pipes: while they are open here, no helper notices that the parent has ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its helpers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}  # whose threads aren't here either
    for each in others:
        each.close()
    torch.set_num_threads(1)  # threads of the parent's pool don't exist here
    with suppress(EOFError, OSError):
        while True:
            answered = answered_by(answer, connection.recv())
            try:
                connection.send(answered)
            except CANT_BE_SENT:
                connection.send(Answered(False, None, ""))
    os._exit(0)


def answered_by(answer: Callable[[Any], Any], job: Any) -> Answered:
    printed = StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            return Answered(True, answer(job), printed.getvalue())
    except Exception:
        return Answered(False, None, printed.getvalue())
