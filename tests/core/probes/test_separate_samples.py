"""The blocks that keep samples apart: found by trial, whatever they are called with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.core.assemble import bare_model
from lowvram.core.probes.separate_samples import SeparateBlocks
from lowvram.core.structure import Blocks
from lowvram.data.spec import DataSpec, Modality, pairs_layout
from lowvram.models.hf import HfConfig
from lowvram.models.hf_heads import Head
from lowvram.tasks import Auto
from tests.core.probes.structures import structure_of
from tests.hugging import tiny
from tests.laboratory import PROBLEMS

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_bd: Tensor) -> Any:
        return x_bd + self.layer(x_bd)


class Tupled(Block):
    def forward(self, x_bd: Tensor) -> Any:
        return super().forward(x_bd), None


class Pair(Block):
    def forward(self, x_bd: Tensor) -> Any:
        return super().forward(x_bd), x_bd


class Mean(Block):
    def forward(self, x_bd: Tensor) -> Any:
        return x_bd + self.layer(x_bd.mean(0, keepdim=True))


class Rolled(Block):
    def forward(self, x_bd: Tensor) -> Any:
        return x_bd + 0.0 * self.layer(x_bd.roll(1, 0))


class Pooled(Block):
    """One sample comes out."""

    def forward(self, x_bd: Tensor) -> Any:
        return self.layer(x_bd).sum(0, keepdim=True)


class Masked(Block):
    """Where the mask is zero, nothing is seen: zeros alone hide every place from every other."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril())

    def forward(self, x_bd: Tensor) -> Any:
        scores = (x_bd[:, :, None] * self.layer(x_bd)[:, None]).masked_fill(self.mask == 0, float("-inf"))
        return (scores.softmax(-1) @ x_bd[..., None])[..., 0]


class MixesByBuffer(Masked):
    """Mixes samples where the mask says so."""

    def forward(self, x_bd: Tensor) -> Any:
        return torch.where(self.mask[0] == 1, x_bd.mean(0, keepdim=True), x_bd) + self.layer(x_bd)


class MixesWithoutBuffer(Masked):
    def forward(self, x_bd: Tensor) -> Any:
        return torch.where(self.mask[0] == 0, x_bd.mean(0, keepdim=True), x_bd) + self.layer(x_bd)


class Chain(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x_bd: Tensor) -> Tensor:
        output = self.block(x_bd)
        return output if isinstance(output, Tensor) else output[0]


class Biased(nn.Module):
    """Gives its block a bias that is the same for all samples, and may train."""

    def __init__(self, rows: int, trains: bool) -> None:
        super().__init__()
        self.bias, self.block = nn.Parameter(torch.zeros(rows, WIDTH), requires_grad=trains), WithBias()

    def forward(self, x_bd: Tensor) -> Tensor:
        return self.block(x_bd, bias=self.bias)


class WithBias(Block):
    def forward(self, x_bd: Tensor, bias: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x_bd + self.layer(x_bd) + bias[:1]


def found(model: nn.Module) -> dict[str, int]:
    inputs_of = lambda num: torch.randn(num, WIDTH)  # noqa: E731
    return SeparateBlocks().find(structure_of(model, inputs_of, [model.get_submodule("block")]))


@pytest.mark.parametrize(
    ("block", "wanted"),
    [
        *((Block, {"block": 0}), (Tupled, {"block": 2}), (Masked, {"block": 0})),
        *((kind, {}) for kind in (Pair, Mean, Rolled, Pooled, MixesByBuffer, MixesWithoutBuffer)),
    ],
)
def test_what_keeps_samples_apart(block: type[nn.Module], wanted: dict[str, int]) -> None:
    model = Chain(block())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert found(model) == wanted
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_normalisation_over_the_batch() -> None:
    assert found(Chain(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))) == {}


@pytest.mark.parametrize(
    ("rows", "trains", "is_found"), [(1, False, True), (1, True, False), (2, False, False), (5, False, False)]
)
def test_what_all_samples_share(rows: int, trains: bool, is_found: bool) -> None:
    """It may not train, nor be taken for what has a row for each sample."""
    assert bool(found(Biased(rows, trains))) == is_found


def test_a_model_that_fake_tensors_can_not_go_through() -> None:
    class Reads(Block):
        def forward(self, x_bd: Tensor) -> Any:
            return x_bd if float(x_bd.sum()) > 0 else super().forward(x_bd)

    assert found(Chain(Reads())) == {}


@pytest.mark.parametrize("problem", ["transformer", "resnet_group", "resnet_frozen"])
def test_own_models(problem: str) -> None:
    task = PROBLEMS[problem]
    model = bare_model(task)
    known = task.structure(model)
    assert tuple(known.get(SeparateBlocks())) == known.get(Blocks()).blocks


SPECS = {
    "gpt2": DataSpec(Modality.TOKENS, 300, (8,)),
    "llama": DataSpec(Modality.TOKENS, 300, (8,)),
    "bert": DataSpec(Modality.LABELLED_TOKENS, 5, (8,), vocab_size=300),
    "vit": DataSpec(Modality.IMAGES, 5, (3, 32, 32)),
    "t5": DataSpec(Modality.PAIRS, 300, (8,), layout=pairs_layout(8, 6)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "is_found"), [(kind, kind != "t5") for kind in SPECS])
def test_models_of_transformers(kind: str, is_found: bool) -> None:
    """The blocks of a T5 pass a bias that trains from one to the next."""
    head = Head.seq2seq_lm if kind == "t5" else Head.auto
    task = Auto().pose(HfConfig(tiny(kind), head=head), SPECS[kind])
    model = bare_model(task)
    known = task.structure(model)
    assert len(known.get(SeparateBlocks())) == (len(known.blocks) if is_found else 0)
