"""The child: one point in a process of its own. It computes and sends events; the parent records them.

However it ends, it sends an event with a status; only if it dies suddenly does the parent determine the status.
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
from pathlib import Path
from typing import Any

import torch

from lowvram.compat.torch_cuda import is_in_bad_fork
from lowvram.config.errors import BadInput
from lowvram.config.exit_codes import EXIT_INTERRUPTED
from lowvram.config.secret import learn, text_without_secrets
from lowvram.config.settings import settings
from lowvram.config.texts import LONGEST_LINE, cut
from lowvram.core.device import choose_device
from lowvram.core.troubles import is_capped, is_out_of_memory
from lowvram.fidelity.reference import reference_of
from lowvram.launch.events import BY_PIPE, encoded, is_heard, write_all
from lowvram.launch.native_log import native_log
from lowvram.launch.supervisor import STOPS, Outlets, RankPlace
from lowvram.loops.session import Events as Tell
from lowvram.loops.session import Interrupted
from lowvram.loops.setup import acting_allocator
from lowvram.loops.user_metrics import user_metrics
from lowvram.planning.cache import TraceCache
from lowvram.planning.time.calibration import Calibrations
from lowvram.planning.time.microbench import calibrate
from lowvram.planning.trace.fake import CantPlan
from lowvram.planning.worker import Planner, plan_device_here, plan_device_of
from lowvram.search.worker import PlanCache, search
from lowvram.worker import job
from lowvram.worker.errors import ending, is_of_a_peer, says_all
from lowvram.worker.limits import lift
from lowvram.worker.rendezvous import Rendezvous, role_of
from lowvram.worker.signals import StopSignals

EXIT_CODES = {"ok": 0, "incompatible": 3, "interrupted": EXIT_INTERRUPTED}
AGAIN_S = 0.01  # after which an interrupt that Python dropped in a destructor is raised again
DROPPED_S = 5.0  # after which an interrupt that has ended nothing is raised again
OF_EVERY_RANK = ("ready", "row")  # events that all ranks send; only the first rank sends the others


class Events:
    """Writes events into the run's file, or those of an answer into a pipe."""

    def __init__(self, outlets: Outlets, rank: int) -> None:
        self._outlets, self._rank = outlets, rank

    def __call__(self, event: str, **fields: Any) -> bool:
        if self._rank and event not in OF_EVERY_RANK:
            return True
        data = encoded({"event": event, **fields})
        try:
            write_all(self._outlets.events, b"\n" + data + b"\n")
        except OSError:  # the disk is full, or nobody reads an answer any more
            if event == "row":
                with suppress(OSError):
                    write_all(self._outlets.printed, BY_PIPE + data + b"\n")
            return False
        return is_heard(self._outlets.printed)


class SpokenStream:
    """Replaces stdout and stderr: writes each line at once into the pipe `fd`, so that who reads it can print it above
    a progress bar. Once nobody reads it, lines are dropped."""

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
        with suppress(BrokenPipeError):
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


def main(request: dict[str, Any], outlets: Outlets, place: RankPlace) -> int:
    """Run one request as one rank; returns the exit code."""
    learn(request)
    role = role_of(place, request)
    events = Events(outlets, role.rank)
    spoken = SpokenStream(outlets.printed, f"rank {role.rank}: " if role.rank else "")
    speak(spoken, is_first=role.rank == 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stop, rendezvous, about = ChildStop(), Rendezvous(role, request), {"rank": role.rank}
    try:
        stop.listen()
        fields = work(request, events, stop, rendezvous)
    except BaseException as error:  # of any class: a point always reports how it ended
        stop.settle()
        fields, of_a_peer = ending(error), is_of_a_peer(error)
        cause = rendezvous.cause_elsewhere(fields, of_a_peer)
        fields, about = fields | cause, about | {"is_of_a_peer": of_a_peer and not cause}
        # The traceback of a rank whose peer has died leads to code that isn't to blame.
        if fields["status"] == "error" and not of_a_peer and not says_all(error, request.get("folder", "/")):
            about |= {"trace": text_without_secrets(traceback.format_exc())}
    stop.settle()
    lift()
    spoken.flush()
    events("row", fields=as_used(fields, request), **about)
    return EXIT_CODES.get(fields["status"], 1)


def as_used(fields: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """The fields, with the options that were really used: `vram` may have changed the allocator."""
    return fields | {"choices": request["choices"]} if "choices" in request else fields


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
    """What the request asks for; returns its part of a row."""
    if "check" in request:
        return check(request["check"])
    if "calibrate" in request:
        return calibrated(request["calibrate"])
    if "search" in request:
        return search_for(request["search"], events)
    if "reference" in request:
        return {"status": "ok", "reference": reference_of(**request["reference"])}
    if "plan" in request:
        return plan(request["plan"], events)
    prepare(Path(request["folder"]) / native_log(rendezvous.rank))
    return job.run_request(request, events, stop, rendezvous)


def check(configs: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the objects of some configurations of a sweep. Raises the first mistake."""
    for config in configs:
        user_metrics(settings(config).eval.metrics or (), torch.device("cpu"))
    return {"status": "ok"}


def plan(points: list[dict[str, Any]], events: Tell) -> dict[str, Any]:
    """Plan point after point, and send each plan as soon as it is made."""
    planner = Planner(TraceCache(), Calibrations())
    for index, point in enumerate(points):
        events("planned", index=index, fields=planned(planner, point))
    return {"status": "ok"}


def calibrated(point: dict[str, Any]) -> dict[str, Any]:
    """Measure the rates of the device that a point runs on, with its allocator, unless they are on disk already."""
    whole = settings(point["config"])
    device = choose_device(whole.root.device)
    name, allocator = acting_allocator(whole, point["choices"], device)
    allocator.set_malloc()
    Calibrations().get(device, name, calibrate)
    return {"status": "ok"}


def search_for(point: dict[str, Any], events: Events) -> dict[str, Any]:
    """Find the candidates of a search; sends an event for each plan that was made."""
    whole, planner = settings(point["config"]), Planner(TraceCache(), Calibrations())
    plan_device = plan_device_here(whole) if point["is_real"] else plan_device_of(whole)
    cache = PlanCache(
        planner,
        whole,
        point["choices"],
        plan_device,
        lambda num_plans: events("searched", num_plans=num_plans),
        is_measured=point["is_real"],
    )
    try:
        events("found", **search(cache, point["pinned"]))
    except CantPlan as error:
        return {"status": "error", "reason": f"{error}; a search needs plans: mode=measure runs a point without one"}
    return {"status": "ok"}


def planned(planner: Planner, point: dict[str, Any]) -> dict[str, Any]:
    """The fields of a plan in the row of one point."""
    whole, launch = settings(point["config"]), point["launch"]
    if not point["is_real"]:
        return planner.fields(whole, point["choices"])
    return planner.fields_here(whole, point["choices"], launch and launch["num_ranks"])


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
