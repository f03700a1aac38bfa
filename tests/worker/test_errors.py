"""What is said of a point that ended with an error."""

from __future__ import annotations

import errno
import io
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch._dynamo.exc import BackendCompilerFailed
from torch._utils import ExceptionWrapper

from lowvram.core.troubles import DISK_TROUBLES, error_number
from lowvram.results.files.manifest import in_the_way
from lowvram.results.files.regular import Irregular, read_regular
from lowvram.worker.errors import ending, phase, says_all

OUT_OF_MEMORY = {
    "Python": MemoryError(),
    "torch": RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    "C++": RuntimeError("std::bad_alloc"),
    "the system": OSError(12, "Cannot allocate memory"),
}
NO_THREAD = {
    "Python": RuntimeError("can't start new thread"),
    "OpenMP": RuntimeError("OMP: Error #34: Thread creation failed"),
    "gloo": RuntimeError(os.strerror(errno.EAGAIN)),  # std::system_error
    "OpenBLAS": RuntimeError("blas_thread_init: pthread_create failed for thread 1 of 2"),
    "OpenMP's helper": RuntimeError(f"OMP: System error #11: {os.strerror(errno.EAGAIN)}"),
}
NO_LIMIT = (  # of a user's socket, and of what the user's code says of it
    BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
    RuntimeError(f"the queue: {os.strerror(errno.EAGAIN)}"),
)


def raised(error: BaseException, filename: str) -> BaseException:
    """The error, with a traceback through a file of this name."""
    code = compile("def act(error):\n    raise error", filename, "exec")
    names: dict[str, Callable[[BaseException], None]] = {}
    exec(code, names)
    try:
        names["act"](error)
    except BaseException as caught:
        return caught
    raise AssertionError


@pytest.mark.parametrize("error", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
def test_whatever_has_found_no_memory(error: Exception) -> None:
    assert ending(error) == {"status": "oom", "reason": "out of memory in the set-up"}


@pytest.mark.parametrize("error", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
def test_the_compiler_has_found_no_memory(error: Exception) -> None:
    """It makes another error of it, and the model isn't to blame."""
    failed = BackendCompilerFailed(lambda: None, error, None).with_traceback(error.__traceback__)
    failed.__cause__ = error
    found = ending(raised(failed, "/site-packages/torch/_dynamo/convert_frame.py"))
    assert found == {"status": "oom", "reason": "out of memory in compiling, which takes memory of its own"}


WHILE_HANDLING = """
def act(error, words):
    try:
        raise error
    except MemoryError:
        raise ValueError(words) {cause}
"""


def while_handling(filename: str, cause: str) -> BaseException:
    """An error that a file of this name raises while it handles another."""
    names: dict[str, Callable[..., None]] = {}
    exec(compile(WHILE_HANDLING.format(cause=cause), filename, "exec"), names)
    try:
        names["act"](MemoryError(), "data.csv has no column x")
    except ValueError as caught:
        return caught
    raise AssertionError


def test_an_error_of_the_users_own_is_no_lack_of_memory_that_it_follows() -> None:
    for cause in ("", "from None"):
        own = ending(while_handling("/home/me/data.py", cause))
        assert own == {"status": "error", "reason": "ValueError: data.csv has no column x"}
        assert ending(while_handling("/site-packages/library.py", cause))["status"] == "oom"
    assert ending(while_handling("/home/me/data.py", "from error"))["status"] == "oom"


@pytest.mark.parametrize(("soft", "status"), [(2**30, "oom"), (resource.RLIM_INFINITY, "error")])
def test_what_libraries_do_not_tell_is_memory_under_a_cap(
    monkeypatch: pytest.MonkeyPatch, soft: int, status: str
) -> None:
    """Else it may be a bug."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, resource.RLIM_INFINITY))
    assert ending(RuntimeError("could not create a primitive"))["status"] == status
    assert ending(SystemError("error return without exception set"))["status"] == status
    for error in NO_THREAD.values():
        assert ending(error)["status"] == status
    for error in NO_LIMIT:
        assert ending(error)["status"] == "error"


def test_a_limit_on_threads_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row names the limit, and isn't final: elsewhere the point may run."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (3, 3))
    for error in NO_THREAD.values():
        end = ending(error)
        assert end["status"] == "error"
        assert end["reason"].startswith(
            "no further process or thread may be started (ulimit -u is 3, for all processes of this user"
        )
    for error in NO_LIMIT:
        assert ending(error)["reason"].startswith(f"{type(error).__name__}: ")


@pytest.mark.parametrize("number", DISK_TROUBLES)
@pytest.mark.parametrize("num_writes", [0, 2, 5])
def test_a_disk_that_fails_is_named(number: int, num_writes: int) -> None:
    """Torch's writer makes errors of its own of what a file raises, but for the first."""

    class Failing(io.BytesIO):
        left = num_writes

        def write(self, data: Any) -> int:
            self.left -= 1
            if self.left < 0:
                raise OSError(number, os.strerror(number))
            return super().write(data)

    def write() -> None:
        torch.save({"a": torch.ones(9), "b": 1}, Failing())

    with pytest.raises((OSError, RuntimeError)) as failed:
        write()
    assert ending(failed.value) == {"status": "error", "reason": f"{DISK_TROUBLES[number]}, in the set-up"}


OF_LIBRARIES = {  # as they raise them where a file can't be written
    "numpy": (OSError("8192 requested and 6112 written"), "a file could not be written whole: "),
    "torch": (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), "a file could not be"),
    "torch's own file": (
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
        "a file could not be written whole: ",
    ),
    "pyarrow": (OSError("Error writing bytes to file. Detail: [errno 27] File too large"), "the file would be larger"),
    "safetensors": (SafetensorError("I/O error: No space left on device (os error 28)"), "the disk is full, in "),
    "sqlite": (ValueError(os.strerror(errno.EDQUOT)), "the disk quota of this user is used up, in "),
}


@pytest.mark.parametrize(("error", "reason"), OF_LIBRARIES.values(), ids=OF_LIBRARIES)
def test_what_libraries_say_of_a_full_disk(error: Exception, reason: str) -> None:
    assert ending(error)["reason"].startswith(reason)


def test_what_is_in_the_place_of_a_file_of_the_run_is_told_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(Irregular) as raised:
        read_regular(tmp_path)
    assert ending(raised.value)["reason"] == f"it is a folder, no regular file, in the set-up: {tmp_path}"
    assert says_all(raised.value, str(tmp_path))


def test_safetensors_tells_in_words_what_the_disk_has(tmp_path: Path) -> None:
    with pytest.raises(SafetensorError) as raised:
        save_file({"weight": torch.ones(1)}, str(tmp_path / "nowhere" / "model.safetensors"))
    assert error_number(raised.value) == errno.ENOENT
    text = "Error while serializing: I/O error: Input/output error (os error 5) at path '.tmp'"
    assert ending(SafetensorError(text))["reason"].startswith("Input/output error, in ")
    assert ending(SafetensorError("Error while deserializing header"))["reason"].startswith("SafetensorError: ")


def test_the_disk_is_not_blamed_for_what_was_raised_on_its_account() -> None:
    error = ValueError("no labels")
    error.__context__ = PermissionError(errno.EACCES, "Permission denied")
    assert ending(error)["reason"] == "ValueError: no labels"


class Broken(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_whose_text_cannot_be_had() -> None:
    broken = Broken()
    broken.__cause__ = broken  # nor does a ring of causes hide it
    assert ending(broken)["reason"] == "Broken: its message can't be had, as that raises RuntimeError"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("sample 3\nis bad"), "sample 3"),
        (ValueError(), "no message"),
        (KeyError("label"), "'label'"),
        (Broken(), "<exception str() failed>"),
    ],
    ids=["lines", "silent", "key", "broken"],
)
def test_what_a_worker_has_died_of_is_the_reason(error: Exception, text: str) -> None:
    try:
        raise error
    except Exception:
        told = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises((type(error), RuntimeError)) as failed:
        told.reraise()
    assert ending(failed.value)["reason"] == f"{type(error).__name__}: {text} (in a worker of the loader)"


def test_an_error_that_is_none_of_memory() -> None:
    assert ending(RuntimeError("a thread has died\nhere")) == {
        "status": "error",
        "reason": "RuntimeError: a thread has died",
    }


def test_a_library_that_finds_no_room_among_limited_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [
        ImportError("libarrow.so: failed to map segment from shared object"),  # as where a mount forbids it
        ImportError("interval.cpython-311-x86_64-linux-gnu.so: cannot map zero-fill pages"),
        ImportError("libarrow.so: cannot create shared object descriptor"),
        SystemError("error return without exception set"),  # of Python's own code
        OSError("could not get source code"),  # the same, of inspect
    ]
    assert {ending(error)["status"] for error in errors} == {"error"}
    monkeypatch.setattr("resource.getrlimit", lambda _: (2**30, 2**30))
    assert {ending(error)["status"] for error in errors} == {"oom"}


def test_a_phase_is_that_of_lowvram_s_own_code_wherever_it_lies() -> None:
    """A clone may be called lowvram, and have torch inside."""
    names: dict[str, Any] = {}
    exec(
        compile("def save(): raise OSError(28, 'full')", "/home/me/lowvram/.venv/torch/serialization.py", "exec"), names
    )
    with pytest.raises(OSError, match="full") as raised:
        names["save"]()
    assert phase(raised.value.__traceback__) == "the set-up"


def test_where_an_error_of_the_run_s_own_files_was_raised_is_not_told(tmp_path: Path) -> None:
    full = OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path / "run" / "metrics.jsonl"))
    assert says_all(full, str(tmp_path / "run"))
    assert not says_all(full, str(tmp_path / "another"))  # a file of the user's: by code of the user's, maybe
    assert not says_all(OSError(errno.EIO, os.strerror(errno.EIO)), str(tmp_path))
    assert not says_all(ValueError("x"), str(tmp_path))
    assert says_all(RuntimeError("can't start new thread"), str(tmp_path))
    way = in_the_way(tmp_path / "run" / "model" / "config.json", "move it elsewhere")
    assert says_all(way, "/")
    assert ending(way)["reason"].startswith(f"{tmp_path}/run/model/config.json is in the way")
