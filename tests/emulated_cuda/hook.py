"""Installs values.py when torch is imported, and compiled.py when its compiler is. A line of a .pth file in the
environment imports this module whenever Python starts."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


class After:
    """An import finder that waits for the first import of a module, and acts after it.

    Args:
        name: of the module.
        act: called with the module.
    """

    def __init__(self, name: str, act: Callable[[Any], None]) -> None:
        self._name, self._act = name, act

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def run_and_act(module: Any) -> None:
            run(module)
            self._act(module)

        spec.loader.exec_module = run_and_act
        return spec


KEPT: list[Any] = []  # what `values.install` returned, which must be kept alive


def with_values(torch: Any) -> None:
    (nvml,) = Path(torch.__file__).parents[1].glob("nvidia/cu*/lib/libnvidia-ml.so.1")
    ctypes.CDLL(str(nvml))  # torch later opens it by its name only, which works once it is loaded
    from tests.emulated_cuda.values import install

    KEPT.append(install())


def with_zeros(heuristics: Any) -> None:
    from tests.emulated_cuda.compiled import install

    install(heuristics)


def same_without_values(fingerprints: Any) -> None:
    """What lies in memory differs when a block is computed again, which would be refused."""
    from tests.emulated_cuda.values import WITHOUT_VALUES

    is_same = fingerprints.Fingerprint.is_same
    fingerprints.Fingerprint.is_same = lambda first, again: bool(WITHOUT_VALUES) or is_same(first, again)


if os.environ.get("EMULATED_VALUES") == "1":
    sys.meta_path.insert(0, After("torch", with_values))
    sys.meta_path.insert(0, After("lowvram.core.fingerprints", same_without_values))
    sys.meta_path.insert(0, After("torch._inductor.runtime.triton_heuristics", with_zeros))
