"""The limit `vram` on the memory that a point may allocate."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch

from lowvram.config.errors import BadInput
from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import Rig
from lowvram.loops.fields import status_bytes

LARGEST_CONTEXT_BYTES = 2**30  # a CUDA context takes 300 to 700 MiB; more than this belongs to other processes


@dataclass(frozen=True)
class Cap(Knob):
    """Limits allocations to `vram_bytes`: by the CUDA allocator's memory fraction, or by RLIMIT_DATA on the CPU."""

    vram_bytes: int

    stage = Stage.PROCESS

    def apply(self, rig: Rig) -> Rig:
        if rig.device.type == "cuda":
            cap_cuda(rig.device, self.vram_bytes)
        else:
            cap_process(self.vram_bytes)
        return rig


def cap_cuda(device: torch.device, vram_bytes: int) -> None:
    """Limit the allocator to `vram_bytes` less the CUDA context.

    Raises:
        BadInput: the context leaves nothing.
    """
    free, total = torch.cuda.mem_get_info(device)
    context_bytes = min(total - free, LARGEST_CONTEXT_BYTES)
    if vram_bytes <= context_bytes:
        allowed = f"more than the {context_bytes / 2**20:.0f} MiB that CUDA itself takes on this device"
        raise BadInput("vram", f"{vram_bytes / 2**20:.0f}MiB", allowed)
    torch.cuda.set_per_process_memory_fraction(min(1.0, (vram_bytes - context_bytes) / total), device)


def cap_process(vram_bytes: int) -> None:
    """Let the process's private data grow by at most `vram_bytes` from now on."""
    square = torch.ones(512, 512)
    torch.mm(square, square)  # starts torch's threads; started under the limit they may hang or abort
    del square
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + vram_bytes, hard))


def lift() -> None:
    """Remove the limit, before the point reports its end: under it not even a thread might start."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
