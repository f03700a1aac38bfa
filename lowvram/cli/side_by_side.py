"""jobs=N: points of a sweep side by side, each process of N with a device of its own. Imports no torch.

A launcher, as Hydra calls what runs a sweep's points. Its processes take one point after another; a process that dies
loses the point that it runs, and another one takes the next.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, cast, final

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from lowvram.config.errors import BadInput
from lowvram.launch.client import Server
from lowvram.launch.process_tree import stop_with_parent

AUTO, ONE = "auto", "1"
CARDS, THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
Words = Sequence[str]
About = tuple[HydraContext, TaskFunction, DictConfig]
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


@dataclass(frozen=True, eq=False)
class Worker:
    """A process that runs points, and the pipe to it."""

    process: BaseProcess
    pipe: Any  # a Connection
    slot: str | None


@final
class SideBySide(Launcher):
    """Runs points in processes of its own.

    Args:
        find_slots: finds the devices; called when the first points are launched.
    """

    def __init__(self, find_slots: Callable[[], Slots]) -> None:
        self._find_slots = find_slots

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._job = (hydra_context, task_function, config)

    def launch(self, job_overrides: Sequence[Words], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the points; returns how each has ended, in their order.

        Raises:
            RuntimeError: a process died.
        """
        setup_globals()
        slots = self._find_slots()[: len(job_overrides)]
        left = iter(enumerate(job_overrides, initial_job_idx))
        running, ended, died = dict[Any, tuple[Worker, int]](), dict[int, JobReturn](), list[int]()
        try:
            for slot in slots:
                self._give(self._start(slot, len(slots)), left, running)
            while running:
                for pipe in cast(list[Any], wait(list(running))):
                    worker, index = running.pop(pipe)
                    try:
                        ended[index] = JobReturn(status=JobStatus.COMPLETED, _return_value=pipe.recv())
                    except (EOFError, OSError):
                        died.append(index)
                        worker.process.join()
                        worker = self._start(worker.slot, len(slots))
                    self._give(worker, left, running)
        finally:
            for worker, _ in running.values():  # the user has left: a worker whose pipe is closed ends after its point
                worker.pipe.close()
        if died:
            raise RuntimeError(f"the process of {', '.join(f'point {index}' for index in died)} was killed")
        return [ended[index] for index in sorted(ended)]

    def _start(self, slot: str | None, num: int) -> Worker:
        ours, theirs = multiprocessing.Pipe()
        singletons = Singleton.get_state()["instances"]  # of Hydra, which its composing needs; resolvers can't be sent
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=work, args=(theirs, singletons, self._job, slot, num), daemon=True)
        process.start()
        theirs.close()  # so that the pipe ends with the process
        return Worker(process, ours, slot)

    def _give(self, worker: Worker, left: Iterator[tuple[int, Words]], running: dict[Any, tuple[Worker, int]]) -> None:
        """Hand the next point to a worker, or let it end."""
        index, words = next(left, (None, ()))
        worker.pipe.send(None if index is None else (index, list(words)))
        if index is None:
            worker.process.join()
            worker.pipe.close()
        else:
            running[worker.pipe] = (worker, index)


def work(pipe: Any, singletons: Any, about: About, slot: str | None, num: int) -> None:
    """In a process of its own: run points until there are no more. It is asked to stop when the program dies."""
    stop_with_parent()
    if has_lost_parent():
        return
    setup_globals()
    Singleton.set_state({**Singleton.get_state(), "instances": singletons})
    os.environ.setdefault(THREADS, str(max(1, len(os.sched_getaffinity(0)) // num)))
    if slot is not None:
        os.environ[CARDS] = slot
    elif num > 1:
        Server.disturbs = f"jobs={num}: other points ran on this CPU at the same time"
    while (given := next_point(pipe)) is not None:
        index, words = given
        pipe.send(ran(index, words, *about))


def has_lost_parent() -> bool:
    """Whether the program died while this process started: its pipe may still hold a point."""
    parent = multiprocessing.parent_process()
    return parent is not None and os.getppid() != parent.pid


def next_point(pipe: Any) -> tuple[int, Words] | None:
    try:
        return pipe.recv()
    except (EOFError, OSError):  # the program is gone
        return None


def ran(index: int, words: Words, context: HydraContext, task: TaskFunction, config: DictConfig) -> Any:
    """Run one point; returns what the task returns."""
    composed = context.config_loader.load_sweep_config(config, list(words))
    with open_dict(composed):
        composed.hydra.job.id = composed.hydra.job.num = index
    HydraConfig.instance().set_config(composed)
    folder, name = "hydra.sweep.dir", "hydra.sweep.subdir"
    done = run_job(hydra_context=context, task_function=task, config=composed, job_dir_key=folder, job_subdir_key=name)
    return done.return_value
