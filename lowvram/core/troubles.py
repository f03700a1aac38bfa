"""Why an error was raised, where the machine is to blame: no memory left, or a file that can't be written or read. Many
libraries raise errors of their own instead of Python's."""

from __future__ import annotations

import errno
import os
import re
import resource
import sysconfig
from pathlib import Path

import torch

from lowvram.config import memory_limits, thread_limits
from lowvram.config.texts import message

OUT_OF_MEMORY_WORDS = ("can't allocate memory", "bad_alloc", "cannot allocate memory")
OUT_OF_MEMORY_WORDS += ("out of memory. tried to allocate",)  # torch's, where TorchScript's interpreter repeats it
# Whole messages of oneDNN and of Python's import. They don't say whether memory ran out, but under `vram` it most
# likely did; so it did for a thread that can't be started.
VAGUE_MESSAGES = ("could not create a primitive", "error return without exception set")
# What ld.so says of a library that gets no memory. Where nothing limits memory, a mount forbids it.
NOT_MAPPED = re.compile(
    r"failed to map segment from shared object|cannot map zero-fill pages|cannot change memory protections"
    r"|cannot (?:allocate|create) .*(?:memory|array|list|descriptor|buffer)"
)
# What a failing file is told as. Those of `PLAIN_WORDS` are recognised by their words too, in whatever error.
DISK_TROUBLES = {
    **{number: os.strerror(number) for number in (errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.ESTALE)},
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota of this user is used up",
    errno.EFBIG: "the file would be larger than ulimit -f or the file system allows",
    errno.EMFILE: "too many open files for this process (ulimit -n)",
    errno.ENFILE: "too many open files on this machine",
    errno.ENAMETOOLONG: "the file's name is too long for the file system",
}
PLAIN_WORDS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# Of libraries that don't tell the errno: torch's writer of files; numpy's, which has written fewer bytes; SQLite's.
TORCHS_WRITER = "inline_container"
CUT_SHORT = re.compile(
    r"\d+ requested and \d+ written"
    r"|inline_container.*unexpected pos \d+ vs \d+|PytorchStreamWriter failed|file write failed"
    r"|database or disk is full|disk I/O error"  # SQLite's
)
LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(thread_limits.__file__).parents[1]), "<")  # "<": generated code
OF_OWN = (errno.EFBIG, errno.EINVAL)  # it is larger than any of lowvram's, or no regular file
IN_WORDS = re.compile(r"I/O error.*\(os error (\d+)\)|\[[Ee]rrno (\d+)\]")


def chain(error: BaseException) -> list[BaseException]:
    """The error, and those that led to it."""
    causes = [error]
    while (cause := cause_of(causes[-1])) is not None:
        if any(cause is known for known in causes):  # a cycle
            break
        causes.append(cause)
    return causes


def cause_of(error: BaseException) -> BaseException | None:
    """The error that led to another one. What the user's code raises while it handles an error, without naming that as
    the cause, is an error of its own; libraries often hide the cause of theirs."""
    return error.__cause__ or (error.__context__ if is_of_library(error) else None)


def is_of_library(error: BaseException) -> bool:
    """Whether installed code, Python's or lowvram's has raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    file = "" if trace is None else trace.tb_frame.f_code.co_filename
    return not file or file.startswith(LIBRARIES) or "-packages/" in file


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; also if a library, such as the compiler, has raised another error because of it."""
    return any(map(says_out_of_memory, chain(error)))


def says_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    is_refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
    is_hidden = isinstance(error, ImportError) and NOT_MAPPED.search(message(error)) is not None
    is_refused |= (is_hidden or memory_limits.is_hidden_in(error)) and memory_limits.are_set()
    says_so = isinstance(error, RuntimeError) and any(word in message(error).lower() for word in OUT_OF_MEMORY_WORDS)
    is_vague = message(error) in VAGUE_MESSAGES or thread_limits.is_cause_of(error)
    return is_refused or says_so or (is_vague and is_capped())


def is_capped() -> bool:
    """Whether `vram` limits the memory of this process (on a CPU)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    return soft != hard


def thread_trouble(error: BaseException) -> str | None:
    """Which limit keeps the machine from starting a thread or a process, if that is why the error was raised."""
    is_refused = any(map(thread_limits.is_cause_of, chain(error)))
    return thread_limits.limits() if is_refused else None


def disk_trouble(error: BaseException) -> str | None:
    """Why a file can't be written or read; also if a library has raised another error because of it."""
    causes = chain(error)
    if isinstance(error, OSError) and error.errno in OF_OWN and error.strerror != os.strerror(error.errno):
        return error.strerror  # of lowvram's own, about a file that it has not read
    for number in PLAIN_WORDS:
        if any(error_number(cause) == number or os.strerror(number) in message(cause) for cause in causes):
            return DISK_TROUBLES[number]
    is_wrapped = TORCHS_WRITER in message(error)
    for cause in causes if is_wrapped else causes[:1]:
        if error_number(cause) in DISK_TROUBLES:
            return DISK_TROUBLES[error_number(cause)]
    if CUT_SHORT.search(message(error)):
        return "a file could not be written whole: the disk is full, or a limit is reached (df, quota, ulimit -f)"
    return None


def error_number(error: BaseException) -> int:
    """The errno of an error, which some libraries give only in its text; 0: it has none."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
        match = IN_WORDS.search(message(error))
        return int(match[1] or match[2]) if match else 0
    return 0
