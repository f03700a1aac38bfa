"""The process of the program as that of its point: breakpoints are on the user's terminal, profilers see all of it.

Nothing is redirected: what the point prints, and what a debugger asks, is on stdout.
"""

from __future__ import annotations

import signal
from bdb import BdbQuit
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from lowvram.launch.protocol import Listener, encoded, parsed
from lowvram.launch.stop import TIMEOUT_GRACE_S
from lowvram.launch.supervisor import STOPS
from lowvram.loops.session import Interrupted
from lowvram.worker import main as child
from lowvram.worker.errors import ending
from lowvram.worker.limits import lift
from lowvram.worker.rendezvous import Rendezvous, SingleProcess
from lowvram.worker.signals import StopSignals

SECOND_SIGNAL = "ended by a second signal before it could save"


@final
class InProcessStop(StopSignals):
    """SIGINT and SIGTERM, which the program counts too, and the alarm of `timeout_s`. The first one waits for the step
    to end, as in a child; the second doesn't."""

    def __init__(self, timeout_s: float | None) -> None:
        super().__init__()
        self._timeout_s = timeout_s or 0.0  # 0: no alarm
        self._has_ended, self._earlier = False, dict[int, Any]()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside the block signals interrupt."""
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
        if callable(tell := self._earlier[number]):
            tell(number, frame)
        if self._has_ended or (first and self._patient):
            return
        raise Interrupted("" if first else SECOND_SIGNAL)


@final
class Events:
    """As those of a child, whose pipe would make the same of them. Whoever listens has done with each at once."""

    def __init__(self, on_event: Listener) -> None:
        self._on_event = on_event

    def __call__(self, event: str, **fields: Any) -> None:
        self._on_event(parsed(encoded({"event": event, **fields})))

    def commit(self) -> bool:
        self("commit")
        return True


def run_here(request: dict[str, Any], on_event: Listener) -> BaseException | None:
    """Plan, or run one point; returns the error that is to be seen as it is, if it ended with one."""

    tell, error = Events(on_event), None
    stop, rendezvous = InProcessStop(request.get("config", {}).get("timeout_s")), Rendezvous(SingleProcess(), request)
    try:
        with stop.listening():
            fields = child.plan(request["plan"], tell) if "plan" in request else run(request, tell, stop, rendezvous)
    except BdbQuit:
        fields = {"status": "interrupted", "reason": "left in the debugger"}
    except BaseException as raised:  # as in a child: a point always reports how it ended
        fields = ending(raised)
        error = raised if fields["status"] == "error" else None
    lift()
    tell("row", fields=child.as_used(fields, request), rank=0)
    return error


def run(request: dict[str, Any], tell: Events, stop: InProcessStop, rendezvous: Rendezvous) -> dict[str, Any]:
    child.write_proc("clear_refs", "5")  # the peak of resident memory starts here
    return child.run_request(request, tell, stop, rendezvous)
