"""What is said of a point that ended with an error."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest
from torch._dynamo.exc import BackendCompilerFailed

from lowvram.endings import ending

OUT_OF_MEMORY = {
    "Python": MemoryError(),
    "torch": RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    "C++": RuntimeError("std::bad_alloc"),
    "the system": OSError(12, "Cannot allocate memory"),
    "a thread": RuntimeError("can't start new thread"),
    "OpenMP": RuntimeError("OMP: Error #34: Thread creation failed"),
}


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


@pytest.mark.parametrize(("soft", "status"), [(2**30, "oom"), (resource.RLIM_INFINITY, "error")])
def test_what_onednn_does_not_tell_is_memory_under_a_cap(
    monkeypatch: pytest.MonkeyPatch, soft: int, status: str
) -> None:
    """Else it may be a bug."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, resource.RLIM_INFINITY))
    assert ending(RuntimeError("could not create a primitive"))["status"] == status


def test_an_error_that_is_none_of_memory() -> None:
    assert ending(RuntimeError("a thread has died\nhere")) == {
        "status": "error",
        "reason": "RuntimeError: a thread has died",
    }
