"""Batches made ahead of time by worker processes, which hand them over in shared memory.

A worker moves a batch there itself, so that what goes wrong is an error of the training process. If torch's thread in
the worker did it, the error would be printed and the batch never come.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.util import get_temp_dir
from pathlib import Path
from traceback import clear_frames
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lowvram.compat.torch_data import end_workers, says_timed_out, tell_what_is_not_sent
from lowvram.config.errors import Shortage
from lowvram.config.texts import first_line
from lowvram.core.rig import Part
from lowvram.results.row import size_text

SHARED = Path("/dev/shm")
LOST_AFTER_S = 20.0  # a batch that was made so long ago, and hasn't come, never will
PAGE_BYTES = mmap.PAGESIZE
REMEDY = "loader=inline needs none; fewer workers or a smaller loader.prefetch less"
LARGER = "give it more (docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm)"


def make_batches_ahead(
    keys: Iterator[Any], make: Callable[[Any], Part], num_workers: int, prefetch: int, device: torch.device
) -> Generator[Part, None, None]:
    """`make(key)` for each key, made by worker processes, each of which keeps `prefetch` batches ready.

    Raises:
        Shortage: the machine lacks shared memory, or room for temporary files, for them.
    """
    made = Made(num_workers * prefetch)
    loader = DataLoader(
        BatchDataset(make, made),
        batch_size=None,  # a key of the dataset is already a whole batch
        sampler=zip(count(), keys),  # pyright: ignore[reportArgumentType]
        num_workers=num_workers,
        prefetch_factor=prefetch,
        timeout=LOST_AFTER_S,
        pin_memory=device.type == "cuda",
        multiprocessing_context="fork",
        generator=torch.Generator(),  # else DataLoader draws from the global one, which would change dropout
    )
    workers = started(loader)
    try:
        for number in count():
            yield arrived(workers, made, number)
    except StopIteration:
        return
    except ConnectionError as error:  # a worker died while it sent a batch
        raise RuntimeError("DataLoader worker exited unexpectedly") from error
    finally:
        end_workers(workers)


def started(loader: Any) -> Iterator[Part]:
    """The loader's batches, its workers started. Raises Shortage."""
    try:
        get_temp_dir()  # of this process and its workers: for the sockets by which batches are handed over
        with interrupts_blocked():
            return iter(loader)
    except OSError as error:
        forget_half_made(error)
        where = f"{SHARED} or the folder for temporary files ({tempfile.gettempdir()})"
        raise Shortage(f"the loader's workers can't be started ({error}): {where} is full; {REMEDY}") from None


def forget_half_made(error: BaseException) -> None:
    """Destroy the loader's iterator that failed in its constructor, and end the workers that it has started. torch's
    destructor of it raises errors, which Python would print."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        clear_frames(error.__traceback__)
    finally:
        sys.unraisablehook = hook


def arrived(workers: Iterator[Part], made: Made, number: int) -> Part:
    """The next batch. Raises Shortage if it was made, but doesn't come."""
    was_made = False
    while True:
        try:
            return next(workers)
        except RuntimeError as error:
            if not says_timed_out(error):
                raise
        if was_made:
            folders = f"{SHARED} or the folder for temporary files ({tempfile.gettempdir()})"
            where = f"{folders} may be full, or too few files may be open (ulimit -n)"
            raise Shortage(f"batch {number} of the loader's workers was made, but never came: {where}; {REMEDY}")
        was_made = made.has(number)


@final
class Made:
    """Which batches the workers have made, in memory that they share."""

    def __init__(self, most: int) -> None:
        """Args:
        most: batches that are made and haven't been used yet.
        """
        self.most = most + 1  # one more is in use
        self.numbers = np.frombuffer(mmap.mmap(-1, 8 * self.most), np.int64)

    def add(self, number: int) -> None:
        self.numbers[number % self.most] = number + 1

    def has(self, number: int) -> bool:
        return bool(self.numbers[number % self.most] == number + 1)

    def num_missing(self) -> int:
        """How many of the batches that will be there at once haven't been made yet."""
        return int((self.numbers == 0).sum())


@final
class BatchDataset(Dataset[Part]):
    """A torch dataset whose items are batches in shared memory."""

    def __init__(self, make: Callable[[Any], Part], made: Made) -> None:
        self.make, self.made = make, made
        self.is_checked = False  # in this worker

    def __getitem__(self, numbered: tuple[int, Any]) -> Part:
        number, key = numbered
        part = self.make(key)
        if not self.is_checked:
            self.is_checked = True
            tell_what_is_not_sent()
            check_temporary_folder()
            check_shared(part, self.made.num_missing())
        try:
            shared = part.map(torch.Tensor.share_memory_)
        except (OSError, RuntimeError) as error:
            raise Shortage(
                f"a batch can't be put into shared memory ({first_line(error)}): {LARGER}; {REMEDY}"
            ) from None
        self.made.add(number)
        return shared


def check_temporary_folder() -> None:
    """Raises Shortage if there is no room for the socket by which this worker hands its batches over."""
    try:
        with tempfile.NamedTemporaryFile(dir=get_temp_dir()):
            pass
    except OSError as error:
        allowed = f"set TMPDIR to another folder; {REMEDY.split(';')[0]}"
        raise Shortage(f"the folder for temporary files is full ({error}): {allowed}") from None


def check_shared(part: Part, num_batches: int) -> None:
    """Raises Shortage if so many batches, all like this one, don't fit into the shared memory that is left."""
    try:
        status = os.statvfs(SHARED)
    except OSError:  # a system that has none
        return
    num_bytes = sum(-(-tensor.nbytes // PAGE_BYTES) * PAGE_BYTES for tensor in part.tensors())
    free = status.f_bavail * status.f_frsize
    if num_batches * num_bytes > free:
        need = f"{size_text(num_batches * num_bytes)} for {num_batches} batches of {size_text(num_bytes)}"
        raise Shortage(f"{SHARED} has {size_text(free)} left, and the loader's workers need {need}: {LARGER}; {REMEDY}")


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C and hang-ups, which a terminal sends to all of its processes: their
    parent ends them. The parent gets a signal sent meanwhile when the block ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
