"""The cap of `vram`: a real limit on the memory that a point may use."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch

from lowvram.config.errors import BadInput
from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import Rig
from lowvram.loops.fields import status_bytes

LARGEST_CONTEXT_BYTES = 2**30  # a CUDA context takes 300 to 700 MiB; more than this is somebody else's


@dataclass(frozen=True)
class Cap(Knob):
    """Nothing beyond `vram_bytes` can be allocated: by the CUDA allocator's fraction, or by RLIMIT_DATA on the CPU."""

    vram_bytes: int

    stage = Stage.PROCESS

    def apply(self, rig: Rig) -> Rig:
        if rig.device.type == "cuda":
            cap_cuda(rig.device, self.vram_bytes)
        else:
            cap_process(self.vram_bytes)
        return rig


def cap_cuda(device: torch.device, vram_bytes: int) -> None:
    """The allocator gets what `vram_bytes` leaves beside the CUDA context."""
    free, total = torch.cuda.mem_get_info(device)
    context_bytes = min(total - free, LARGEST_CONTEXT_BYTES)
    if vram_bytes <= context_bytes:
        allowed = f"more than the {context_bytes / 2**20:.0f} MiB that CUDA itself takes on this device"
        raise BadInput("vram", f"{vram_bytes / 2**20:.0f}MiB", allowed)
    torch.cuda.set_per_process_memory_fraction(min(1.0, (vram_bytes - context_bytes) / total), device)


def cap_process(vram_bytes: int) -> None:
    """Private data may grow by `vram_bytes` from here."""
    square = torch.ones(512, 512)
    torch.mm(square, square)  # threads that start under the limit hang or abort: start them first
    del square
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + vram_bytes, hard))


def lift() -> None:
    """Remove the cap before the point reports its end: under it not even a thread could start."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
