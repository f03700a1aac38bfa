"""A process that has imported all that a program, its fork server and its child need, and forks whole programs.

`python train.py …` takes 4 seconds, most of them imports. A fork of this process takes the same way from
`lowvram.cli.start.main` on in milliseconds, with the words, folder, streams and environment that it is given; where the
program starts its fork server as a new interpreter, it forks once more. It never computes: see process/server.py.
"""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
from hydra._internal.hydra import Hydra
from hydra.core.plugins import Plugins

import lowvram
from lowvram.launch.supervisor import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl
from tests.calls import ROOT
from tests.faults import faults
from tests.faults.entries import enter
from tests.faults.shim import Page, Role

IMPORTS = (
    "lowvram.cli.main",
    "lowvram.launch.fork_server",
    "lowvram.results.report.report",
    "lowvram.search.worker",
    "wandb",
)
SCRIPTS = ("lowvram.report", "lowvram.table")  # they run when they are imported
MOST_FDS = 1 << 16  # more descriptors than a process here has
SERVER = "lowvram.launch.fork_server"


def warm_up() -> None:
    """Import everything, and leave it to no garbage collector."""
    for name in IMPORTS:
        importlib.import_module(name)
    from lowvram.launch import fork_server as server

    modules = (found.name for found in pkgutil.walk_packages(lowvram.__path__, "lowvram."))
    for name in (*server.PRELOAD, *modules):
        if name not in SCRIPTS:
            import_unless_lacking(name)
    from lowvram.config import registry
    from lowvram.knobs.optimizer import low_bit

    Plugins.instance()
    registry.read_all()  # what each process would read of conf/
    low_bit.compiled_step = faults.eager(low_bit.compiled_step)  # as in all tests
    gc.collect()
    gc.freeze()


def import_unless_lacking(name: str) -> None:
    """Import a module, unless it needs a library that isn't installed here: triton, of torch's builds for CPUs."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("", "lowvram"):
            raise


@dataclass
class Program:
    """One that runs, in a session of its own."""

    pid: int
    out: Path
    began: float
    code: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def said(self) -> str:
        return self.out.read_text(errors="backslashreplace")

    def members(self) -> list[int]:
        """All processes of it that are there: it and what it has forked stay in its session."""
        return [pid for pid in numbers_in("/proc") if session(pid) == self.pid]

    def ask_to_end(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        for pid in self.members():
            os.kill(pid, signal.SIGKILL)


def numbers_in(folder: str) -> list[int]:
    """The names there that are numbers, as those of processes."""
    return [int(path.name) for path in Path(folder).iterdir() if path.name.isdigit()]


def session(pid: int) -> int | None:
    """That of a process which isn't dead."""
    try:
        state, _, _, number, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(number)


def begin(
    words: Sequence[str],
    cwd: Path,
    out: Path,
    page: Page,
    env: dict[str, str],
    prepare: Callable[[], object] = lambda: None,
) -> Program:
    """Fork a program, which first calls `prepare`."""
    pid = os.fork()
    if pid:
        return Program(pid, out, time.monotonic())
    code = 70
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a campaign that is broken off leaves no program
        become(words, cwd, out, env)
        prepare()
        Forked.page, page.pids[:] = page, [os.getpid(), 0, 0]
        os.register_at_fork(after_in_child=lambda: note(page))
        run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def become(words: Sequence[str], cwd: Path, out: Path, env: dict[str, str]) -> None:
    """The streams, words, folder and environment of a program that was just started."""
    os.chdir(cwd)
    os.environ.update(env)
    nowhere, written = os.open(os.devnull, os.O_RDONLY), os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for fd, source in enumerate((nowhere, written, written)):
        os.dup2(source, fd)
    os.closerange(3, 1024)
    use_streams()
    sys.argv = [str(ROOT / "train.py"), *words]
    sys.orig_argv = [sys.executable, *sys.argv]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def use_streams() -> None:
    """Python's own streams are those of the process again."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115


def note(page: Page) -> None:
    """In a new process: it is the point's if the fork server has forked it."""
    if page.pids[Role.SERVER] == os.getppid():
        page.pids[Role.CHILD] = os.getpid()


def run() -> NoReturn:
    """What a new interpreter would do with the words, with a fork server that is forked."""
    from lowvram.launch import client

    Hydra.get_mode = mode_of
    client.subprocess = Forking()  # pyright: ignore[reportAttributeAccessIssue]
    sys.exit(enter(sys.argv[1:]))


def mode_of(self: Any, config_name: Any, overrides: list[str]) -> Any:
    """As Hydra's own, which composes everything for it: a fifth of a second. What is typed here sets no mode."""
    return None


class Forking:
    """The module `subprocess`, as the client of the fork server uses it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, command: Sequence[str], **about: Any) -> Any:
        return (Forked if SERVER in command else subprocess.Popen)(command, **about)


class Forked(subprocess.Popen):
    """A fork server that is a fork of this process instead of a new interpreter."""

    page: Page

    def _execute_child(self, args: Sequence[str], executable: Any, preexec_fn: Any, close_fds: Any, *more: Any) -> None:
        pass_fds, _, env = more[:3]
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            self.page.pids[Role.SERVER] = self.pid
            return
        code = 1
        try:
            serve(args, pass_fds, env)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def serve(args: Sequence[str], pass_fds: Sequence[int], env: dict[str, str]) -> None:
    """What `python -m lowvram.launch.fork_server FD` does."""
    from lowvram.launch import fork_server as server

    os.environ.clear()
    os.environ.update(env)
    for kept, next_kept in pairwise([*sorted({0, 1, 2, *pass_fds}), MOST_FDS]):
        os.closerange(kept + 1, next_kept)  # without a listing, which a limit on descriptors may forbid
    use_streams()
    sys.argv = list(args[-2:])
    faults.arm()
    torch.compiler.set_stance(
        "default", force_backend="aot_eager"
    )  # compilers take many seconds, and have tests of their own
    server.main()


def become_subreaper() -> None:
    """Whoever outlives its program is this process's child, and seen."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
