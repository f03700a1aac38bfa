"""Imports code of the user's own, or of another library, that the user has named."""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowvram.config.code_names import IMPORTED
from lowvram.config.errors import BadInput, require


def import_object(target: str, key: str) -> Callable[..., Any]:
    """The class or function of a dotted name, looked for where Python does and in the working directory.

    Args:
        key: that of the field; one of `IMPORTED`, so that folders of others can't have it imported unasked.

    Raises:
        BadInput: there is no such module, or it has no such name, or can't be called; or the module would end the
            program, or close its output.
    """
    assert key in IMPORTED, key
    path, _, name = target.rpartition(".")
    allowed = "the dotted name of a class or function, such as package.module.Class"
    require(bool(path) and bool(name), key, target, allowed)
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        with streams_kept(key, target), exits_refused(key, target):
            imported = getattr(importlib.import_module(path), name, None)
    except ModuleNotFoundError as error:
        if not f"{path}.".startswith(f"{error.name}."):
            raise BadInput(key, target, f"importable: it needs {error.name}, which isn't installed here") from None
        raise BadInput(key, target, f"{allowed}: there is no module {error.name} here or in Python's path") from None
    require(imported is not None, key, target, f"{allowed}: {path} has no {name}")
    assert imported is not None
    require(callable(imported), key, target, f"{allowed}: {name} is a {type(imported).__name__}")
    return imported


@contextmanager
def exits_refused(key: str, target: str) -> Iterator[None]:
    """Inside it a module that would end the program is a BadInput: as a script, one may call sys.exit. A Ctrl-C, where
    Python itself turns it into an exception, gets through."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            raise
        what = f"calls sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raises {type(error).__name__}"
        raise BadInput(key, target, f"importable: its module {what} when it is imported") from error


@contextmanager
def streams_kept(key: str, target: str) -> Iterator[None]:
    """Inside it a module that closes standard output or error is a BadInput, which can still be printed: both are as
    before afterwards."""
    streams, copies = (sys.stdout, sys.stderr), {fd: os.dup(fd) for fd in (1, 2) if is_open(fd)}
    try:
        yield
    finally:
        closed = [fd for fd in copies if not is_open(fd)]
        for fd, copy in copies.items():
            if fd in closed:
                os.dup2(copy, fd)
            os.close(copy)
        for name, stream in zip(("stdout", "stderr"), streams, strict=True):
            if getattr(stream, "closed", False):
                fd = 1 if name == "stdout" else 2
                setattr(sys, name, open(fd, "w", errors="backslashreplace", closefd=False))  # noqa: SIM115
                closed.append(fd)
    if closed:
        raise BadInput(key, target, "importable: its module closes the program's standard output or error")


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def check_args(function: Callable[..., Any], target: str, args: Mapping[str, Any], key: str) -> None:
    """Raises BadInput unless `function`, which `target` names, can be called with `args`."""
    try:
        inspect.signature(function).bind(**args)
    except TypeError as error:
        raise BadInput(key, args, f"what {target} takes ({error})") from None
    except ValueError:  # it has no signature, as some builtins
        pass
