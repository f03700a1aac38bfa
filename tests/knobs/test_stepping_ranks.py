"""in_backward and cpu_offload on parameters that two ranks share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowvram.core.assemble import assemble
from lowvram.core.mesh import data_ranks
from lowvram.core.shards import whole
from lowvram.core.step import step
from lowvram.knobs.accum import Parts
from lowvram.knobs.logits import TiledLogits
from lowvram.knobs.stepping import AfterBackward, CpuOffload, InBackward, Norm, SumsIn
from tests.laboratory import CPU, PROBLEMS, InDouble, batches, knobs_of, relative_error
from tests.ranks import on_ranks

SIZES, CLIP = [16] * 6, 0.3
Choices = dict[str, Any]
CASES: dict[str, tuple[Choices, Choices]] = {  # with the choices of one process that must do the same
    "at once": ({"stepping": "in_backward"}, {}),
    "on host": ({"stepping": InBackward(CLIP)}, {"stepping": AfterBackward(CLIP)}),
    "two passes": ({"stepping": InBackward(CLIP, Norm.two_passes)}, {"stepping": AfterBackward(CLIP)}),
    "in_backward, all": (
        {"stepping": InBackward(CLIP), "accum": "x2", "ckpt": "every2", "logits": "chunked"},
        {"stepping": AfterBackward(CLIP)},
    ),
    "in_backward, tiles": (
        {"stepping": InBackward(CLIP), "accum": "x2", "logits": TiledLogits(5)},
        {"stepping": AfterBackward(CLIP)},
    ),
    "cpu_offload": ({"stepping": CpuOffload(CLIP)}, {"stepping": AfterBackward(CLIP)}),
    "cpu_offload, half": (
        {"stepping": CpuOffload(CLIP, 0.5), "accum": "x2", "ckpt": "every2"},
        {"stepping": AfterBackward(CLIP)},
    ),
}


def trained(choices: Choices) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss and norm of each step, and all parameters afterwards."""
    task = InDouble(PROBLEMS["transformer"])
    rig, losses, norms = assemble(task, knobs_of(**choices), CPU), [], []
    for batch in batches(task.spec, SIZES, torch.float64):
        loss, update = step(rig, Parts(data_ranks().size).split(batch)[data_ranks().rank])
        assert update.applied
        losses.append(loss)
        norms.append(update.grad_norm)
    return torch.stack(losses), torch.stack(norms), {n: whole(p) for n, p in rig.model.named_parameters()}


def train_all() -> dict[str, tuple[Tensor, Tensor, dict[str, Tensor]]]:
    return {name: trained({**ours, "sharding": "fsdp"}) for name, (ours, _) in CASES.items()}


def on_device(sums: SumsIn) -> Choices:
    return {"stepping": InBackward(CLIP, sums=sums), "accum": "x2", "logits": TiledLogits(5)}


def train_with_device_sums() -> dict[SumsIn, tuple[Tensor, Tensor, dict[str, Tensor]]]:
    return {sums: trained({**on_device(sums), "sharding": "fsdp"}) for sums in (SumsIn.bf16, SumsIn.int8)}


@pytest.mark.slow
def test_shards_are_summed_in_few_bits_on_their_device() -> None:
    """Up to the noise of rounding, which is another in each layout of shards."""
    _, norms, parameters = trained({"stepping": AfterBackward(CLIP)})
    for results in on_ranks(train_with_device_sums):
        for sums, (_, found_norms, found) in results.items():
            torch.testing.assert_close(found_norms, norms, rtol=2e-2, atol=0, check_dtype=False)
            assert relative_error(found, parameters) <= (5e-3 if sums is SumsIn.bf16 else 2e-2)


@pytest.mark.slow
def test_shared_parameters_end_where_whole_ones_do() -> None:
    wanted = {name: trained(plain) for name, (_, plain) in CASES.items()}
    for results in on_ranks(train_all):
        for name, (losses, norms, parameters) in results.items():
            torch.testing.assert_close(losses, wanted[name][0], rtol=1e-10, atol=0)
            torch.testing.assert_close(norms, wanted[name][1], rtol=1e-10, atol=0)
            assert relative_error(parameters, wanted[name][2]) <= 1e-10, name
