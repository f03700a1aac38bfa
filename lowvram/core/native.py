"""Functions in C for the CPU, which are compiled when the first of them is called: in less than a second, for this
processor, into a folder that is removed at once."""

from __future__ import annotations

import ctypes
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from lowvram.core.device import c_compiler
from lowvram.core.mesh import tell

# Not contracted: products and sums are rounded one by one, as torch's operators round them.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
THREADS = "-fopenmp"  # not every compiler brings its library


def run(source: Path, function: str, *args: Tensor | int) -> bool:
    """Call a function of a file in C, which computes with all threads that torch has. Returns whether it could be
    called: there may be no compiler, and its tensors may be anything but plain ones on the CPU.

    Args:
        function: is given the addresses of the tensors' numbers, whole numbers of 64 bits, and the number of threads.
    """
    tensors = [each for each in args if isinstance(each, Tensor)]
    if not all(each.device.type == "cpu" and each.is_contiguous() for each in tensors):
        return False
    library = compiled(source)
    if library is None:
        return False
    numbers = (each.data_ptr() if isinstance(each, Tensor) else each for each in (*args, torch.get_num_threads()))
    getattr(library, function)(*map(ctypes.c_int64, numbers))
    return True


@cache
def compiled(source: Path) -> ctypes.CDLL | None:
    compiler, why = c_compiler(), "no C compiler was found"
    with TemporaryDirectory(prefix="lowvram-") as folder:
        for flags in ((*FLAGS, THREADS), FLAGS) if compiler else ():
            made = Path(folder, "native.so")
            command = [compiler, *flags, str(source), "-o", str(made), "-lm"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
                if done.returncode == 0:
                    return ctypes.CDLL(str(made))
                why = f"{compiler} couldn't compile it: {' '.join(done.stderr.split())[:200]}"
            except OSError as error:
                why = f"{compiler}: {error}"
    tell(f"note: {source.stem} runs without its code in C, many times slower ({why}): install gcc, or set CC")
    return None
