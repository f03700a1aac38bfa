"""Jobs in other processes (hydra/launcher=joblib and others): passes Ctrl-C and the call's environment on to them.
Imports no torch.

A terminal sends Ctrl-C to every process. It would kill a launcher's processes, and their jobs with them. So they
inherit a signal mask that blocks it. A thread of the program waits for signals and appends a byte to a file for each;
the jobs watch the file's size. The first two signals are passed on; the third makes the program leave the launcher.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from _thread import interrupt_main
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import DictConfig, read_write

from lowvram.compat.hydra import own_launcher
from lowvram.config.identity import ROOT
from lowvram.launch.stop import stop_signals
from lowvram.launch.supervisor import STOPS
from lowvram.results.files.marker import MARKER
from lowvram.results.files.run_folder import is_running
from lowvram.results.terminal import hydra_quoted

CALL, CARDS = "LOWVRAM_CALL", "CUDA_VISIBLE_DEVICES"  # in the environment of jobs
POLL_S = 0.1
MAX_PASSED_ON = 2  # signals that are passed on
SIDE_BY_SIDE = "points run at the same time on this machine: their memory peaks are right, their times not comparable"


def is_elsewhere(hydra: DictConfig) -> bool:
    """Whether jobs run in other processes than the program."""
    return hydra.launcher["_target_"] != own_launcher()


@contextmanager
def jobs_elsewhere(config: DictConfig) -> Iterator[None]:
    """Inside the block, the processes that a launcher starts get this call's environment and its signals."""
    with read_write(config.hydra.overrides.hydra):  # each process composes for itself, with another time of day
        config.hydra.overrides.hydra.append(f"hydra.sweep.dir={hydra_quoted(config.hydra.sweep.dir)}")
    with calls_elsewhere():
        yield


@contextmanager
def calls_elsewhere() -> Iterator[None]:
    """As `jobs_elsewhere`, for processes that compose nothing."""
    with TemporaryDirectory(prefix="lowvram-call-") as folder:
        stops = Path(folder) / "stops"
        stops.touch()
        about = {"stops": str(stops), "argv": sys.argv, "orig_argv": sys.orig_argv, "cards": os.environ.get(CARDS)}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with in_environment({CALL: json.dumps(about), "PYTHONPATH": path}), signals_passed_on(stops):
            yield


@contextmanager
def in_environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def signals_passed_on(stops: Path) -> Iterator[None]:
    """Block signals in this process and its children; a thread passes them on."""

    def hear(number: int, frame: Any = None) -> None:
        if stop_signals.num >= MAX_PASSED_ON:
            raise KeyboardInterrupt  # the only way to leave a launcher
        before = stop_signals.num
        stop_signals.add(number)  # which doesn't count what a shell repeats
        with stops.open("ab") as file:
            file.write(b"." * (stop_signals.num - before))

    def wait() -> None:
        while not is_over.is_set():
            if (heard := signal.sigtimedwait(STOPS, POLL_S)) is not None:
                interrupt_main() if stop_signals.num >= MAX_PASSED_ON else hear(heard.si_signo)

    handlers = {number: signal.signal(number, hear) for number in STOPS}
    mask, is_over = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS), threading.Event()
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def join() -> None:
    """Connect this process, which a launcher has started, to the program's call."""
    about = json.loads(os.environ.get(CALL, "{}"))
    stop_signals.listen(Path(about["stops"]) if about else None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # sent to this process alone
    if about:
        sys.argv, sys.orig_argv = about["argv"], about["orig_argv"]  # printed commands start with them
        see_cards(about["cards"])


def see_cards(before: str | None) -> None:
    """Show this process the GPUs that the program sees. submitit_local hides all of them unless
    hydra.launcher.gpus_per_node is typed; points would then run on the CPU under the ids of a GPU's points."""
    if os.environ.get(CARDS) == "":
        os.environ.pop(CARDS)
        os.environ.update({} if before is None else {CARDS: before})


def wait_for_points(folder: Path) -> None:
    """After a launcher has failed: wait until no point of the sweep in `folder` runs any more."""
    while any(is_running(marker.parent) for marker in folder.glob(f"*/{MARKER}")):
        time.sleep(POLL_S)
