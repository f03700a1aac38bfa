"""Private names of Triton: how its compiled kernels are launched. Imported when a card first needs it: torch for
a CPU comes without Triton.
"""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from lowvram.compat.torch_cuda import stream_handle

ALIGNED_BYTES = 16  # Triton copies so many at a time where an address is a multiple of it


@final
class Launcher:
    """Launches a kernel, which is compiled once for each kind of its first argument, and for each of its constants.
    Triton's own call looks at all arguments again each time, and at hooks of its profiler, for much longer than the
    launch itself takes.

    CompiledKernel.run, function and packed_metadata, since 3.0, in the order in which Triton itself passes them.
    Replaced by a public launch of a compiled kernel, if Triton makes one.

    The other arguments may differ in their values alone: tensors at aligned addresses, and integers of 31 bits that the
    kernel doesn't specialize on.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[Any, Any] = {}

    def __call__(
        self, num_programs: int, values: Tensor, args: tuple[Any, ...], constants: tuple[int | float, ...]
    ) -> None:
        device = values.device.index
        kind = (values.dtype, device, values.data_ptr() % ALIGNED_BYTES == 0, constants)
        grid, compiled = (num_programs, 1, 1), self.compiled.get(kind)
        if compiled is not None:
            about = (compiled.function, compiled.packed_metadata, None, None, None)  # no metadata for hooks, no hooks
            compiled.run(*grid, stream_handle(device), *about, values, *args, *constants)
        else:  # fused, a product isn't rounded before it is added, as the formula's is
            self.compiled[kind] = self.kernel[grid](values, *args, *constants, enable_fp_fusion=False)
