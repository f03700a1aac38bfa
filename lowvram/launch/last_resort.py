"""Ends the program when user code, such as a callback that waits for ever, blocks its main thread. Imports no torch.

Python handles signals and time limits in the main thread, between two of its instructions. So another thread reads the
signals as they arrive, looks at the clock, and ends the program if the main thread doesn't.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import final

from lowvram.config.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED
from lowvram.launch.process_tree import children, kill_all, signal_if_there
from lowvram.launch.supervisor import STOPS

LOOK_S = 0.2
MOST_SIGNALS, SIGNAL_GRACE_S = 3, 1.0  # how many signals end the program, and how long its main thread has after them
BLOCKED_S = 2.0  # a main thread that follows a point is heard of more often
SAVING_S = 12.0  # from the time limit of a point whose program is blocked: it may save a snapshot
STDERR = 2
Record = Callable[[str, str], None]  # of a row: status and reason


@final
class LastResort:
    """The thread, and what it must know. The main thread may change each field while the thread runs, which therefore
    reads each once."""

    def __init__(self) -> None:
        self.server_pid: int | None = None  # of the fork server, while it runs
        self._num_signals, self._last_signal_s = 0, 0.0
        self._heard_s = 0.0  # when the main thread was last heard of
        self._late_s: float | None = None  # when the time of the point is up
        self._record: Record | None = None
        self._is_asked = False  # whether the processes of a point that is late were asked to end

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the program, whose main thread has set its handlers: what is inside is ended if it blocks."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._num_signals = 0
        watcher = threading.Thread(target=self._watch, args=(reader,), daemon=True)
        try:
            watcher.start()
        except (RuntimeError, MemoryError):  # a limit, of which whoever comes to it again says more
            os.close(reader)
            os.close(writer)
            yield
            return
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            os.close(writer)  # the end of what the watcher reads, and so its own
            watcher.join()
            os.close(reader)

    def hear(self) -> None:
        """Called regularly by the main thread, to show that it isn't blocked."""
        self._heard_s = time.monotonic()

    @contextmanager
    def guarding(self, late_s: float | None, record: Record) -> Iterator[None]:
        """Around the processes of a point: when its time is up, as time.monotonic() tells it, and what writes its
        row."""
        self.hear()
        self._late_s = late_s
        self._record, self._is_asked = record, False
        try:
            yield
        finally:
            self._late_s = self._record = None

    def _watch(self, reader: int) -> None:
        while True:
            if select.select([reader], [], [], LOOK_S)[0]:
                numbers = os.read(reader, select.PIPE_BUF)
                if not numbers:
                    return
                self._num_signals += sum(number in STOPS and number != signal.SIGHUP for number in numbers)
                self._last_signal_s = time.monotonic()
            now = time.monotonic()
            if self._num_signals >= MOST_SIGNALS and now - self._last_signal_s > SIGNAL_GRACE_S:
                self._end("interrupted", "ended by a third signal before it could save", EXIT_INTERRUPTED)
            late_s = self._late_s
            if late_s is not None and now > late_s and now - self._heard_s > BLOCKED_S:
                self._end_late(now - late_s)

    def _end_late(self, late_s: float) -> None:
        """First ask the processes of the point to end, as they may save a snapshot."""
        server_pid = self.server_pid
        if not self._is_asked and server_pid is not None:
            for pid in children(server_pid):
                signal_if_there(pid, signal.SIGTERM)
        self._is_asked = True
        if late_s > SAVING_S:
            why = "still running after timeout_s; code in the program itself, such as a callback, blocked it"
            self._end("timeout", why, EXIT_FAILED)

    def end_taken_over(self, reason: str) -> None:
        """Called by another thread: end the program and the processes of its point at once. They may write nothing more
        in the folder, so no row is left."""
        self._record = None
        self._end("interrupted", reason, EXIT_INTERRUPTED)

    def _end(self, status: str, reason: str, code: int) -> None:
        server_pid, record = self.server_pid, self._record
        if server_pid is not None:
            with suppress(OSError):
                kill_all(server_pid)
        if record is not None:
            with suppress(Exception):  # whatever state the main thread has left
                record(status, reason)
        with suppress(OSError):
            os.write(STDERR, f"\n{reason}\n".encode())
        os._exit(code)


last_resort = LastResort()  # one per process, as signal handlers are
# In a fork nobody watches. Signals to it would count as the program's, or be written into a file that has the number.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
