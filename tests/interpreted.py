"""Triton's interpreter, which runs kernels on a CPU: in a process that imports Triton so."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest


@contextmanager
def interpreter() -> Iterator[Callable[..., Any]]:
    """Gives `run(function, *args)`, which calls a function in that process."""
    if find_spec("triton") is None:
        pytest.skip("Triton isn't installed")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_INTERPRET", "1")
        started = multiprocessing.get_context("spawn").Pool(1)
    with started as pool:
        yield lambda function, *args: pool.apply(function, args)
