"""Installs values.py when torch is imported. A line of a .pth file in the environment imports this module whenever
Python starts."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


class AfterTorch:
    """An import finder that hooks the first import of torch, and calls `values.install` after it."""

    library: Any = None  # what `install` returned, which must be kept alive

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
            ctypes.CDLL(str(nvml))  # torch later opens it by its name only, which works once it is loaded
            from tests.emulated_cuda.values import install

            AfterTorch.library = install()

        spec.loader.exec_module = run_and_install
        return spec


if os.environ.get("EMULATED_VALUES") == "1":
    sys.meta_path.insert(0, AfterTorch())
