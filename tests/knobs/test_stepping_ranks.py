"""in_backward and cpu_offload on parameters that two ranks share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn

from lowvram.core.rig import Stepper
from lowvram.knobs.optimizer import AdamW
from lowvram.knobs.stepping import AfterBackwardStepper, CpuOffloadStepper, InBackwardStepper, Norm
from tests.laboratory import relative_error

NUM_STEPS, NUM_RANKS, CLIP = 5, 2, 0.5
STEPPERS = {
    "in_backward": lambda parameters, clip: InBackwardStepper(parameters, AdamW().make, clip, Norm.host),
    "in_backward, two passes": lambda parameters, clip: InBackwardStepper(
        parameters, AdamW().make, clip, Norm.two_passes
    ),
    "cpu_offload": lambda parameters, clip: CpuOffloadStepper(parameters, AdamW().make, clip, 1.0),
    "cpu_offload, half": lambda parameters, clip: CpuOffloadStepper(parameters, AdamW().make, clip, 0.5),
}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def take_steps(model: nn.Module, stepper: Stepper, rank: int | None, num_parts: int) -> list[float]:
    """The norm of each step. A rank takes its share of the batch; None takes all of it."""
    norms = []
    for seed in range(NUM_STEPS):
        x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        mine = x if rank is None else x.chunk(NUM_RANKS)[rank]
        stepper.begin(num_parts)
        for part in mine.chunk(num_parts):  # ranks are averaged, so each counts its samples twice
            stepper.backward(model(part).square().sum() * (1 if rank is None else NUM_RANKS))
        update = stepper.update()
        assert update.applied
        norms.append(float(update.grad_norm))
    return norms


def on_a_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    results = {}
    for name, make in STEPPERS.items():
        for clip in (None, CLIP):
            for num_parts in (1, 2):
                model = make_model()
                for layer in (model[0], model[2], model):
                    fully_shard(layer)  # pyright: ignore[reportArgumentType]
                norms = take_steps(model, make(list(model.parameters()), clip), rank, num_parts)
                whole = {key: value.full_tensor() for key, value in model.state_dict().items()}
                results[name, clip, num_parts] = (norms, whole)
                assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    if rank == 0:
        torch.save(results, f"{folder}/results.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_shared_parameters_end_where_whole_ones_do(tmp_path: Path) -> None:
    spawn(on_a_rank, (str(tmp_path),), nprocs=NUM_RANKS)
    results = torch.load(tmp_path / "results.pt")
    assert len(results) == len(STEPPERS) * 4
    for (name, clip, num_parts), (norms, parameters) in results.items():
        model = make_model()
        stepper = AfterBackwardStepper(list(model.parameters()), AdamW().make(list(model.parameters())), clip)
        wanted = take_steps(model, stepper, None, 1)
        assert norms == pytest.approx(wanted, rel=1e-10), (name, clip, num_parts)
        assert relative_error(parameters, model.state_dict()) <= 1e-10, (name, clip, num_parts)
