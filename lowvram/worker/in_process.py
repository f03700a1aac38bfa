"""Runs a point in the program's own process (process=inline), so that debuggers have a terminal and profilers see
everything.

Nothing is redirected: what the point prints goes to stdout.
"""

from __future__ import annotations

import os
import signal
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, final

from lowvram.launch.client import Ending, Order, answering
from lowvram.launch.events import Listener, encoded, opened_anew, parsed, write_all
from lowvram.launch.spec import Point, PointSpec
from lowvram.launch.stop import TIMEOUT_GRACE_S
from lowvram.launch.supervisor import STOPS
from lowvram.launch.torchrun import Launch
from lowvram.loops.session import Interrupted
from lowvram.worker import job
from lowvram.worker.asks import ASKS
from lowvram.worker.errors import ending
from lowvram.worker.limits import lift
from lowvram.worker.main import write_proc
from lowvram.worker.rendezvous import Rendezvous
from lowvram.worker.signals import StopSignals

SECOND_SIGNAL = "ended by a second signal before it could save"


@final
class InProcessStop(StopSignals):
    """Handles SIGINT and SIGTERM, which the program's own handlers also count, and an alarm after `timeout_s`. The
    first signal takes effect at the end of the step, as in a child; the second one at once."""

    def __init__(self, timeout_s: float | None) -> None:
        super().__init__()
        self._timeout_s = timeout_s or 0.0  # 0: no alarm
        self._has_ended, self._earlier = False, dict[int, Any]()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside it signals raise Interrupted."""
        numbers = (*STOPS, signal.SIGALRM) if self._timeout_s else STOPS
        self._earlier = {int(number): signal.signal(number, self._on_signal) for number in numbers}
        signal.setitimer(signal.ITIMER_REAL, self._timeout_s, TIMEOUT_GRACE_S)
        try:
            yield
        finally:
            self._has_ended = True
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in self._earlier.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        first = self.heard(number)
        if callable(earlier := self._earlier[number]):
            earlier(number, frame)
        is_repeated = not first and number == signal.SIGHUP  # by the shell
        if self._has_ended or is_repeated or (first and self._patient):
            return
        raise Interrupted("" if first else SECOND_SIGNAL)


@final
class Events:
    """Passes events to the listener directly, beside those of the folder's file. The listener has handled each event
    when the call returns.

    Args:
        fd: the file; None: an answer has none.
    """

    is_child = False

    def __init__(self, on_event: Listener, fd: int | None) -> None:
        self._on_event, self._fd = on_event, fd

    def __call__(self, event: str, **fields: Any) -> bool:
        data = encoded({"event": event, **fields})
        if self._fd is not None:
            with suppress(OSError):  # a full disk is told by what the run itself writes
                write_all(self._fd, data + b"\n")
        self._on_event(parsed(data))
        return True


@final
class Inline:
    """Takes the place of the fork server, with the same events and the same row."""

    disturbs = "process=inline: peaks and times are those of the whole program"
    is_fresh = False

    def __init__(self) -> None:
        self.error: BaseException | None = None  # that ended the point with the status "error": the user sees its trace

    def wait_until_ready(self, order: Callable[[], bytes | None]) -> None:
        """Nothing to wait for: torch is imported."""

    def run(self, point: Point, on_event: Listener, order: Order) -> list[Ending]:
        """Run one point. Signals and the time limit reach it directly, without `order`."""
        point.write()
        fds, stop = opened_anew(point.folder), InProcessStop(point.config["timeout_s"])
        try:
            return self._end(Events(on_event, fds[0]), stop, lambda events: run(point, events, stop))
        finally:
            for fd in fds:
                os.close(fd)

    def ask(
        self,
        name: str,
        arguments: dict[str, Any],
        order: Order,
        on_event: Listener = lambda event: None,
        tries: int = 1,
    ) -> dict[str, Any]:
        """Answer a question of `worker/asks.py`. Nobody else can: `tries` doesn't matter."""
        answer = dict[str, Any]()
        events = Events(answering(answer, on_event), None)
        self._end(events, InProcessStop(None), lambda events: ASKS[name](events, **arguments))
        return answer

    def _end(self, events: Events, stop: InProcessStop, work: Callable[[Events], dict[str, Any]]) -> list[Ending]:
        """Work to the end, whatever it is, and tell the row's fields."""
        try:
            with stop.listening():
                fields = work(events)
        except BdbQuit:
            fields = {"status": "interrupted", "reason": "left in the debugger"}
        except BaseException as raised:  # as in a child: a point always reports how it ended
            fields = ending(raised)
            self.error = raised if fields["status"] == "error" else None
        lift()
        events("row", fields=fields, rank=0)
        return [{"rank": 0, "status": 0, "ended_by": None, "is_stopped": False}]


def run(spec: PointSpec, events: Events, stop: InProcessStop) -> dict[str, Any]:
    write_proc("clear_refs", "5")  # resets the peak of resident memory
    return job.run_spec(spec, events, stop, Rendezvous(Launch(0, 1, 0, 1)))
