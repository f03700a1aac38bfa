"""The fork server: imports torch once, forks new children for every request, and kills what they leave behind.

Run as `python -m lowvram.launch.fork_server SOCKET_FD`. A request is one message on the socket with file descriptors:
the request itself (JSON in a memory file), the pipe into which the ranks print, the file or pipe of their events, and
any number of descriptors that they only keep open. The answer says how the children ended. While they run, the messages
TERM and KILL end them; a closed socket means that the parent is gone.

The server only imports, and never computes: if it ran a single tensor operation, its children would deadlock (OpenMP
after fork); if it queried CUDA, they couldn't use CUDA.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys

from lowvram.compat.torch_compiler import COMPILER_MODULE
from lowvram.config.registry import read_all
from lowvram.launch.process_tree import children
from lowvram.launch.supervisor import (
    KILL,
    MOST_FDS,
    PR_SET_CHILD_SUBREAPER,
    STOPS,
    TERM,
    WORKER,
    Outlets,
    Supervisor,
    prctl,
)

PRELOAD = (
    "torch",
    "torch.optim",
    "torch.utils.data",
    "torch.utils.checkpoint",
    COMPILER_MODULE,
    "torch.utils.flop_counter",
    "safetensors.torch",
    WORKER,
    "lowvram.loops.train",
    "lowvram.loops.measure",
)


def main() -> None:
    """Serve requests until the parent closes the socket."""
    parent = socket.socket(fileno=int(sys.argv[1]))
    for number in STOPS:  # the parent and the children handle them
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for name in PRELOAD:
        importlib.import_module(name)
    with contextlib.suppress(Exception):  # a mistake in a file is told where the option is used
        read_all()
    gc.collect()
    gc.freeze()  # so that children's garbage collections don't write to shared pages
    with contextlib.suppress(ConnectionError):  # the parent is gone
        parent.send(b"ready")
        while serve(parent):
            pass
    sweep_strays()


def serve(parent: socket.socket) -> bool:
    """Serve one request; False if the parent is gone."""
    message, fds, _, _ = socket.recv_fds(parent, 64, MOST_FDS, socket.MSG_CMSG_CLOEXEC)
    if not message:
        return False
    if message in (TERM, KILL):  # for a child that had ended already
        return True
    request_fd, printed_fd, events_fd, *held = fds
    with os.fdopen(request_fd, "rb") as file:
        file.seek(0)
        request = json.load(file)
    supervisor = Supervisor(request, Outlets(printed_fd, events_fd), parent)
    supervisor.run(held)
    sweep_strays()
    if supervisor.parent_is_there:
        parent.send(json.dumps(supervisor.ended).encode())
    return supervisor.parent_is_there


def sweep_strays() -> None:
    """Kill what the child left behind (loader workers, compilers). As this process is their subreaper, they are its
    children now."""
    while pids := children(os.getpid()):
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
    os._exit(0)  # what is frozen would never be freed: Triton 3.9 prints a page of what it calls leaked
