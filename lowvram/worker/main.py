"""The child: one point in a process of its own. It computes and sends events; the parent records them.

However it ends, it tells an event with a status, and its first rank writes the row; only if it dies suddenly does
whoever follows it determine the status.
"""

from __future__ import annotations

import errno
import faulthandler
import os
import signal
import stat
import sys
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowvram.compat.threads import start_or_fail
from lowvram.compat.torch_cuda import is_in_bad_fork
from lowvram.config.errors import BadInput
from lowvram.config.exit_codes import EXIT_FAILED
from lowvram.config.secret import learn, text_without_secrets
from lowvram.config.texts import LONGEST_LINE, cut
from lowvram.core.troubles import is_capped, is_out_of_memory
from lowvram.launch.events import BY_PIPE, encoded, is_heard, write_all
from lowvram.launch.native_log import native_log
from lowvram.launch.spec import PointSpec
from lowvram.launch.supervisor import STOPS, Outlets
from lowvram.launch.torchrun import Launch
from lowvram.loops.session import Interrupted
from lowvram.results import metric_lines
from lowvram.results import row as rows
from lowvram.results.files.lease import guard
from lowvram.results.row import Status
from lowvram.runs.retry import is_due
from lowvram.runs.row_so_far import RowSoFar
from lowvram.worker import job
from lowvram.worker.asks import ASKS
from lowvram.worker.errors import ending, is_of_a_peer, says_all
from lowvram.worker.limits import lift
from lowvram.worker.rendezvous import Rendezvous, WrongStart
from lowvram.worker.signals import StopSignals

AGAIN_S = 0.01  # after which an interrupt that Python dropped in a destructor is raised again
DROPPED_S = 5.0  # after which an interrupt that has ended nothing is raised again
OF_EVERY_RANK = ("ready", "row")  # events that all ranks send; only the first rank sends the others


class Events:
    """Writes events into the run's file, or those of an answer into a pipe. Returns whether somebody follows them.

    Args:
        is_alone: whether nobody follows the run.
    """

    is_child = True

    def __init__(self, outlets: Outlets, rank: int, is_alone: bool = False) -> None:
        self._outlets, self._rank, self._is_alone = outlets, rank, is_alone
        self.so_far: RowSoFar | None = None  # of the run, once it is known

    def __call__(self, event: str, **fields: Any) -> bool:
        if self._rank and event not in OF_EVERY_RANK:
            return True
        if self.so_far is not None:
            self.so_far.on_event(event, fields)
        data = encoded({"event": event, **fields})
        try:
            write_all(self._outlets.events, b"\n" + data + b"\n")
        except OSError:  # the disk is full, or nobody reads an answer any more
            if event == "row":
                with suppress(OSError):
                    write_all(self._outlets.printed, BY_PIPE + data + b"\n")
            return False
        return not self._is_alone and is_heard(self._outlets.printed)

    def know(self, rank: int, fields: dict[str, Any]) -> None:
        """Take in how another rank has ended, which it tells itself."""
        if self.so_far is not None:
            self.so_far.on_event("row", {"rank": rank, "fields": fields})

    def of_rank(self, rank: int, fields: dict[str, Any]) -> None:
        """Tell how another rank has ended."""
        self("row", rank=rank, fields=fields)


class SpokenStream:
    """Replaces stdout and stderr: writes each line at once into the pipe `fd`, so that who reads it can print it above
    a progress bar. Lines that can't be written are dropped."""

    def __init__(self, fd: int, prefix: str = "") -> None:
        self._fd, self._prefix = fd, prefix
        self._pieces, self._num_kept, self._num_cut = list[str](), 0, 0  # of the line that is being written
        self.encoding, self.errors = "utf-8", "backslashreplace"

    def write(self, text: str) -> int:
        *lines, rest = text.split("\n")
        for line in lines:
            self._add(line)
            self._tell()
        self._add(rest)
        return len(text)

    def _add(self, text: str) -> None:
        if kept := text[: LONGEST_LINE - self._num_kept]:
            self._pieces.append(kept)
        self._num_kept += len(kept)
        self._num_cut += len(text) - len(kept)

    def _tell(self) -> None:
        line = self._prefix + "".join(self._pieces)
        num_cut, self._pieces, self._num_kept, self._num_cut = self._num_cut, [], 0, 0
        line = cut(line, num_cut) if num_cut else line
        with suppress(OSError):  # nobody reads it any more; or it is a file on a full disk
            write_all(self._fd, f"{line}\n".encode(errors="backslashreplace"))

    def flush(self) -> None:
        if self._num_kept:
            self._tell()

    def isatty(self) -> bool:
        return False


class ChildStop(StopSignals):
    """Handles SIGINT and SIGTERM. They raise Interrupted at once, except inside `defer_interrupts`, where the loop ends
    after the step; and again every `DROPPED_S` until the point ends, as any code may drop an exception that it catches.
    """

    def listen(self) -> None:
        """Begin to handle signals, also one that has come since the fork."""
        for number in (*STOPS, signal.SIGALRM):
            signal.signal(number, self._on_signal)
        sys.unraisablehook = self._on_unraisable
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # the server has blocked them

    def _on_signal(self, number: int, frame: Any) -> None:
        is_first = self.heard(number)
        if (is_first or number == signal.SIGALRM) and not self._patient:
            signal.setitimer(signal.ITIMER_REAL, DROPPED_S)
            raise Interrupted

    def _on_unraisable(self, dropped: Any) -> None:
        """Python drops exceptions that are raised in a destructor. An interrupt is raised again a moment later. An
        allocation that failed under `vram` isn't printed here, as the point reports it when it ends."""
        if isinstance(dropped.exc_value, Interrupted):
            self.requested = False
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        elif not (is_capped() and is_out_of_memory(dropped.exc_value)):
            sys.__unraisablehook__(dropped)

    def settle(self) -> None:
        """Ignore signals from now on: the point has ended, and its row will be sent."""
        self._patient = True
        signal.setitimer(signal.ITIMER_REAL, 0)


def main(request: dict[str, Any], outlets: Outlets, rank: int, listener: int) -> int:
    """Run one request as one rank; returns the exit code.

    Args:
        rank: among those that the fork server has started.
        listener: see `Rendezvous`.
    """
    learn(request)
    start_or_fail()
    started, num_ranks = request.get("launch"), request.get("num_ranks", 1)  # by torchrun, or by the fork server
    launch = Launch(**started) if started else Launch(rank, num_ranks, rank, num_ranks)
    is_alone = request.get("is_alone", False)
    events = Events(outlets, launch.rank, is_alone)
    spoken = SpokenStream(outlets.printed, f"rank {launch.rank}: " if launch.rank else "")
    speak(spoken, is_first=launch.rank == 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stop, rendezvous = ChildStop(), Rendezvous(launch, listener, is_unwatched=bool(started))
    about: dict[str, Any] = {"rank": launch.rank}
    is_wrong_start = False
    try:
        stop.listen()
        fields = work(request, events, stop, rendezvous)
    except BaseException as error:  # of any class: a point always reports how it ended
        stop.settle()
        fields, of_a_peer, is_wrong_start = ending(error), is_of_a_peer(error), isinstance(error, WrongStart)
        cause = rendezvous.cause_elsewhere(fields, of_a_peer)
        fields, about = fields | cause, about | {"is_of_a_peer": of_a_peer and not cause}
        # The traceback of a rank whose peer has died leads to code that isn't to blame.
        if fields["status"] == "error" and not of_a_peer and not says_all(error, request.get("folder", "/")):
            about |= {"trace": text_without_secrets(traceback.format_exc())}
    stop.settle()
    lift()
    spoken.flush()
    events("row", fields=fields, **about)
    if is_wrong_start and is_alone:
        print(fields["reason"])
        return Status(fields["status"]).exit_single
    if events.so_far is not None and launch.rank == 0 and not (about.get("is_of_a_peer") or is_wrong_start):
        try:
            if not write_row(events.so_far, is_alone) and is_alone:
                print(fields["reason"] or fields["status"])
        except OSError as error:  # whoever follows the run says so, if anybody does
            if is_alone:
                print(f"{error.strerror} while writing {error.filename or request['folder']}")
                return EXIT_FAILED
    return Status(fields["status"]).exit_single


def write_row(so_far: RowSoFar, is_alone: bool) -> bool:
    """Write the row of a run that has ended, unless somebody else decides about it: whoever began the run, if it was
    refused, if it can begin again, or if a comparison or another measurement follows; or an earlier run that it went on
    from, until it has saved a step. Returns whether it was written.

    Args:
        is_alone: whether nobody follows the run.
    """
    so_far.add_reports(0, so_far.reports)
    so_far.add({"reason": None, **so_far.reports[0].fields})
    status = so_far.row["status"]
    is_refused = status == Status.INCOMPATIBLE and not so_far.has_steps and not is_alone
    is_again = status == Status.OOM and so_far.more_parts is not None and not is_alone
    is_earlier_kept = so_far.spec.is_resumed and status != Status.OK and not so_far.has_saved
    spec = so_far.spec
    is_followed = spec.config["measure"]["fidelity"] or spec.reruns is not None or is_due(so_far.row)
    if spec.fidelity is not None or is_refused or is_again or is_earlier_kept or (is_followed and not is_alone):
        return False
    metric_lines.sync(so_far.spec.folder)
    so_far.complete()
    rows.write(so_far.spec.folder, so_far.row)
    return True


def speak(spoken: SpokenStream, is_first: bool) -> None:
    """Send what is printed to the parent. All ranks print the same to stdout, so ranks above 0 send only stderr."""
    sys.stderr = as_stream(spoken)
    sys.stdout = sys.stderr if is_first else Path(os.devnull).open("w", errors="backslashreplace")  # noqa: SIM115
    if not os.environ.get("PYTHONBREAKPOINT"):  # else it names a debugger that may need no terminal
        sys.breakpointhook = refuse_breakpoint


def refuse_breakpoint(*args: Any, **kwargs: Any) -> None:
    """Raises BadInput: in a child pdb would wait for input for ever."""
    raise BadInput("process", "child", "inline where the code calls breakpoint(): a child has no terminal")


def as_stream(spoken: Any) -> Any:
    """The same object, for type checkers: it has as much of a text stream as is needed."""
    return spoken


def work(request: dict[str, Any], events: Events, stop: ChildStop, rendezvous: Rendezvous) -> dict[str, Any]:
    """Run the point, or answer the question; returns the fields of the row."""
    if name := request.get("ask"):
        return ASKS[name](events, **request["arguments"])
    folder = Path(request["folder"])
    if (fence := request.get("fence")) is not None:
        guard(Path(fence[0]), fence[1])
    prepare(folder / native_log(rendezvous.rank))
    spec = replace(PointSpec.read(folder, request["hidden"]), **request.get("changes", {}))
    learn(spec.config)
    events.so_far = RowSoFar(spec)
    found = job.run_spec(spec, events, stop, rendezvous)
    rendezvous.leave(found, events.of_rank if rendezvous.is_unwatched else events.know)
    return found


def prepare(native_log: Path) -> None:
    """Prepare the process for clean measurements, and for a useful trace if it dies."""
    write_proc("oom_score_adj", "800")  # so that the kernel's OOM killer takes the point, not the parent
    write_proc("clear_refs", "5")  # resets the peak of resident memory
    # Truncated only when it is known to be a file of ours: a link leads to somebody else's.
    log = os.open(native_log, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    if not stat.S_ISREG(os.fstat(log).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(native_log))
    try:
        os.ftruncate(log, 0)
    except OSError as error:  # which names no file
        raise OSError(error.errno, error.strerror, str(native_log)) from None
    os.dup2(log, 2)  # for what native code prints when it crashes
    faulthandler.enable(file=log, all_threads=True)
    if is_in_bad_fork():
        raise RuntimeError("the fork server has touched CUDA: its children can't")


def write_proc(name: str, text: str) -> None:
    """Write to a file of /proc/self, if possible: where a sandbox forbids it, only a measurement is less exact."""
    with suppress(OSError):
        Path(f"/proc/self/{name}").write_text(text)
