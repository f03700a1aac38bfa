"""Installs values.py once torch is imported: a line of a .pth file in the environment imports this at every start."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


class AfterTorch:
    """A finder that finds torch once, as the others do, and has the values installed when it has run."""

    library: Any = None  # kept alive

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def run_and_install(module: Any) -> None:
            run(module)
            (nvml,) = Path(module.__file__).parents[1].glob("nvidia/cu*/lib/libnvidia-ml.so.1")
            ctypes.CDLL(str(nvml))  # torch opens it by its name alone, which is then enough
            from tests.emulated_cuda.values import install

            AfterTorch.library = install()

        spec.loader.exec_module = run_and_install
        return spec


if os.environ.get("EMULATED_VALUES") == "1":
    sys.meta_path.insert(0, AfterTorch())
