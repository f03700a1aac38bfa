"""The fork server: imports torch once, forks a fresh child for every request, watches it, sweeps up after it.

Run as `python -m lowvram.process.server SOCKET_FD`. A request is one message on the socket with two file descriptors:
the request itself (JSON in a memory file) and the pipe for the child's events. The answer is how the child died.
While a child runs, the messages TERM and KILL end it; a closed socket means that the parent is gone.

Traps, all met: a server that ran one tensor operation deadlocks its children (OpenMP after fork); one that asked
for CUDA poisons them. So it imports, and never computes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

TERM, KILL = b"term", b"kill"
STOPS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 10.0  # from SIGTERM to SIGKILL when the parent is gone: time for a last snapshot
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
EXIT_ORPHANED = 70
PRELOAD = (
    "torch",
    "torch.optim",
    "torch.utils.data",
    "torch.utils.checkpoint",
    "torch._dynamo",  # the first optimizer would import it, a second late
    "torch.utils.flop_counter",
    "safetensors.torch",
    "lowvram.process.child",
    "lowvram.modes.train",
    "lowvram.modes.measure",
)

libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")


def main() -> None:
    """Serve requests until the parent closes the socket."""
    parent = socket.socket(fileno=int(sys.argv[1]))
    for number in STOPS:  # they are for the parent and the child
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # children share these pages
    with contextlib.suppress(ConnectionError):  # the parent is gone
        parent.send(b"ready")
        while serve(parent):
            pass
    sweep_strays()


def serve(parent: socket.socket) -> bool:
    """One request; False when the parent is gone."""
    message, fds, _, _ = socket.recv_fds(parent, 64, 2)
    if not message:
        return False
    if message in (TERM, KILL):  # meant for a child that had died already
        return True
    request_fd, events_fd = fds
    with os.fdopen(request_fd, "rb") as file:
        file.seek(0)
        request = json.load(file)
    child = spawn(request, events_fd, parent)
    os.close(events_fd)
    status, parent_is_there = watch(child, parent)
    num_strays = sweep_strays()
    if parent_is_there:
        parent.send(json.dumps({"status": status, "strays": num_strays}).encode())
    return parent_is_there


def spawn(request: dict[str, Any], events_fd: int, parent: socket.socket) -> int:
    """Fork the child of one request; returns its process id."""
    server = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # none is lost before the child can answer it
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        return pid
    code = EXIT_ORPHANED
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:  # else the server died before the line above
            parent.close()
            from lowvram.process import child

            code = child.main(request, events_fd)
    finally:
        os._exit(code)  # no destructors, no atexit: milliseconds instead of half a second


def watch(pid: int, parent: socket.socket) -> tuple[int, bool]:
    """Wait for the child, passing on what the parent says. Returns (wait status, whether the parent is there)."""
    child = os.pidfd_open(pid)
    parent_is_there, deadline = True, None
    try:
        while True:
            listening = [child, parent] if parent_is_there else [child]
            ready, _, _ = select.select(
                listening, [], [], None if deadline is None else max(0, deadline - time.monotonic())
            )
            if child in ready:
                return os.waitpid(pid, 0)[1], parent_is_there
            if parent in ready:
                message = parent.recv(64)
                os.kill(pid, signal.SIGKILL if message == KILL else signal.SIGTERM)
                if not message:
                    parent_is_there, deadline = False, time.monotonic() + GRACE_S
            elif deadline is not None and time.monotonic() >= deadline:
                os.kill(pid, signal.SIGKILL)
                deadline = None
    finally:
        os.close(child)


def sweep_strays() -> int:
    """End what the child left behind (loader workers, compilers); all of it was handed to us as the subreaper."""
    num_killed = 0
    while pids := children():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        num_killed += len(pids)
    return num_killed


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


if __name__ == "__main__":
    main()
