"""Limits on processes and threads, as containers and batch systems set them."""

from __future__ import annotations

import errno
import multiprocessing
import os
import socket
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from lowvram.config.thread_limits import is_cause_of, limits, pids_max, says_so
from tests.raising import raising_as_c

AGAIN = os.strerror(errno.EAGAIN)


def test_the_limits_of_all_groups_count(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("3:pids:/job/step\n0::/slice/job\n4:cpu:/../up\n")
    counts = {"pids/job/step": "max", "pids/job": "40", "slice/job": "64", "slice": "max", "up": "1"}
    for folder, text in counts.items():
        (tmp_path / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / folder / "pids.max").write_text(f"{text}\n")
    assert sorted(pids_max(tmp_path)) == [40, 64]
    assert "pids.max of this container or job is 40" in limits(tmp_path)
    assert pids_max(tmp_path / "nothing") == []


SAYING = {
    "libgomp": f"libgomp: Thread creation failed: {AGAIN}",
    "OpenBLAS": f"OpenBLAS blas_thread_init: pthread_create failed for thread 1 of 2: {AGAIN}",
    "Intel's OpenMP": f"OMP: Error #34: System unable to allocate necessary resources\nOMP: System error #11: {AGAIN}",
    "C++": f"terminate called after throwing an instance of 'std::system_error'\n  what():  {AGAIN}",
    "Rust": f'ThreadPoolBuildError {{ kind: IOError(Os {{ code: 11, message: "{AGAIN}" }}) }}',
    "bash": f"run.sh: fork: retry: {AGAIN}",
    "git": f"error: cannot fork() for rev-parse: {AGAIN}",
    "gcc": f"gcc: fatal error: cannot execute 'as': vfork: {AGAIN}",
}
OTHERS = {
    "a socket": f"recv: {AGAIN}",
    "a file": f"cat: -: {AGAIN}",
    "a socket of C++": f"gloo/transport/tcp/pair.cc: readv [127.0.0.1]: {AGAIN}",
    "after forks": f"avoid using `tokenizers` before the fork if possible\ncurl: (7) {AGAIN}",
}


def test_what_logs_say_of_threads_and_processes_counts_and_nothing_else() -> None:
    assert [name for name, text in SAYING.items() if not says_so(f"line\n{text}\n")] == []
    assert [name for name, text in OTHERS.items() if says_so(f"line\n{text}\n")] == []


def from_a_socket() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        one.recv(1)


def from_a_full_pipe() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, bytes(2**16))
    finally:
        os.close(reader)
        os.close(writer)


def from_a_user() -> None:
    raise OSError(errno.EAGAIN, AGAIN)


def from_multiprocessing() -> None:
    multiprocessing.get_context("fork").Process(target=print).start()


def from_subprocess() -> None:
    subprocess.run(["true"], check=True, cwd="/")


def error_of(act: Callable[[], None]) -> BaseException:
    try:
        act()
    except OSError as error:
        return error
    raise AssertionError


def test_an_error_of_the_system_counts_where_a_process_was_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only the text of its traceback is left, as of another process."""
    refuse = raising_as_c(BlockingIOError(errno.EAGAIN, AGAIN))
    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr(subprocess, "_fork_exec", refuse)
    for act, counts in {
        from_multiprocessing: True,
        from_subprocess: True,
        from_a_socket: False,
        from_a_full_pipe: False,
        from_a_user: False,
    }.items():
        error = error_of(act)
        assert is_cause_of(error) is counts, act
        assert says_so("".join(traceback.format_exception(error))) is counts, act


def test_of_cpp_an_error_that_says_nothing_else_counts() -> None:
    """std::system_error, as torch raises it for threads of its own."""
    assert is_cause_of(RuntimeError(AGAIN))
    assert not is_cause_of(RuntimeError(f"my queue: {AGAIN}"))
    assert not is_cause_of(BlockingIOError(errno.EAGAIN, AGAIN))
