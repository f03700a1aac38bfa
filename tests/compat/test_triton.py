"""Private names of Triton, where there is Triton and a card."""

from __future__ import annotations

import torch

from tests.compat.sentences import needed
from tests.laboratory import needs_gpu

pytestmark = needs_gpu


@needed("triton.compiler.CompiledKernel.run", by="stepping.sums and activations=int8 on a card")
def test_a_compiled_kernel_is_launched_again() -> None:
    from lowvram.compat.triton import Launcher
    from lowvram.knobs.stepping.sum_kernels import bf16_kernel

    launcher, device = Launcher(bf16_kernel), torch.device("cuda")
    values, sums = torch.ones(64, device=device), torch.zeros(64, dtype=torch.bfloat16, device=device)
    for _ in range(3):
        launcher(1, values, (sums, 4, 1), (16, 2048))
    torch.cuda.synchronize()
    assert len(launcher.compiled) == 1
