"""Blocks that draw, change or write in place, recomputed on a CUDA device: all is as in a plain loop.

A card's generator is another one than the CPU's, and a recomputation must set it back, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowvram
from lowvram.core.generators import seed_all
from tests.laboratory import IS_EMULATED, needs_gpu
from tests.restless import BLOCKS, Net
from tests.test_laws_restless import BATCH, LR, SGD, batches, made, sum_of_losses, values_in

pytestmark = needs_gpu
Steps = list[tuple[Tensor, Tensor]]
KNOBS = [
    *("ckpt=every1", "ckpt=selective", "ckpt=sqrt", "ckpt=every1 offload=activations"),
    *("ckpt=every1 stepping=in_backward stepping.clip=1e9 stepping.norm=two_passes", "accum=x2 ckpt=sqrt"),
]
ON_THE_CPU = {"OwnGenerator", "NumpyMask"}  # what they draw lies on the CPU
OF_CUDNN = {
    "Gru",
    "BidirectionalGru",
    "Lstm",
    "Rnn",
    "GruCell",
    "LstmCell",
    "RnnCell",
    "RecurrentNorm",
}  # no values on an emulated card
LEFT_OUT = ON_THE_CPU | (OF_CUDNN if IS_EMULATED else set())
BAND = 1e-9  # of fp64: kernels of a card may add in another order


@pytest.fixture
def steps() -> Iterator[Steps]:
    """Batches in fp64 on the card, and blocks that make what they draw there, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield [(x.to("cuda"), y.to("cuda")) for x, y in batches()]
    torch.set_default_dtype(before)
    torch.set_default_device("cpu")


def on_card(block: Callable[[], nn.Module]) -> Net:
    torch.set_default_device("cpu")
    model = made(block).to("cuda")
    torch.set_default_device("cuda")
    return model


def plain(block: Callable[[], nn.Module], num_parts: int, steps: Steps) -> tuple[nn.Module, list[float]]:
    """A plain loop."""
    model, losses = on_card(block), list[float]()
    for step, (x, y) in enumerate(steps):
        seed_all(step)
        model.zero_grad()
        of_parts = list[float]()
        for xs, ys in zip(x.chunk(num_parts), y.chunk(num_parts), strict=True):
            loss = F.cross_entropy(model(xs), ys, reduction="sum") / BATCH
            loss.backward()
            of_parts.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * (torch.zeros(()) if parameter.grad is None else parameter.grad)
        losses.append(sum(of_parts))
    return model, losses


@pytest.mark.parametrize("name", [name for name in BLOCKS if name not in LEFT_OUT])
def test_a_step_is_that_of_a_plain_loop(name: str, steps: Steps) -> None:
    for knobs in KNOBS:
        wanted, wanted_losses = plain(BLOCKS[name], 2 if "accum" in knobs else 1, steps)
        model, losses = on_card(BLOCKS[name]), list[float]()
        kind = type(model.blocks[0]).__name__
        task = lowvram.task(model, steps[0][0], sum_of_losses, blocks=kind)
        rig = lowvram.assemble(task, f"{SGD} {knobs}", "cuda")
        for step, (x, y) in enumerate(steps):
            seed_all(step)
            losses.append(lowvram.step(rig, lowvram.Part(x, y))[0].item())
        assert losses == pytest.approx(wanted_losses, rel=BAND), knobs
        assert values_in(model) == values_in(wanted), knobs
        for (key, found), value in zip(model.state_dict().items(), wanted.state_dict().values(), strict=True):
            torch.testing.assert_close(found.double(), value.double(), rtol=BAND, atol=1e-10, msg=f"{knobs}: {key}")
