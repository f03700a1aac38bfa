"""The MLPs of blocks: found by name, and only if they compute each token from that token alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.core.assemble import bare_model
from lowvram.data.spec import DataSpec, Modality, pairs_layout
from lowvram.knobs.tile.mlps import USUAL_NAMES, Mlps
from lowvram.models.hf import HfConfig
from lowvram.tasks import Auto
from tests.core.probes.structures import structure_of
from tests.hugging import tiny
from tests.laboratory import PROBLEMS

WIDTH = 6


class Shift(nn.Module):
    """Each token sees the one before it; the weight starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x_btd: Tensor) -> Tensor:
        return x_btd + self.share * x_btd.roll(1, 1)


class Places(nn.Module):
    """Adds a vector of its own to each of 5 places."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.zeros(5, WIDTH))

    def forward(self, x_btd: Tensor) -> Tensor:
        return x_btd + self.vectors


class Experts(nn.Module):
    """Each token goes to the better of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x_btd: Tensor) -> Tensor:
        best = self.router(x_btd).softmax(-1).max(-1, keepdim=True)
        both = torch.stack([expert(x_btd) for expert in self.experts], -2)
        return best.values * both.gather(-2, best.indices[..., None].expand(*x_btd.shape[:-1], 1, WIDTH))[..., 0, :]


class Normalised(nn.Sequential):
    """Over all tokens of the batch."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(0, 1), nn.BatchNorm1d(WIDTH), nn.Unflatten(0, (2, -1)))


class Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))


class Constant(nn.Module):
    """Hides NaN, so that nothing can be said of it."""

    def forward(self, x_btd: Tensor) -> Tensor:
        return x_btd.nan_to_num()


class Pair(nn.Module):
    def forward(self, x_btd: Tensor) -> tuple[Tensor, None]:
        return x_btd, None


class Block(nn.Module):
    """Its MLP is called `mlp`, or as the test says."""

    def __init__(self, mlp: nn.Module, name: str = "mlp") -> None:
        super().__init__()
        self.name = name
        self.mixer = nn.ModuleDict({name: mlp})

    def forward(self, x_btd: Tensor) -> Tensor:
        output = self.mixer[self.name](x_btd)
        return x_btd + (output[0] if isinstance(output, tuple) else output)


class Chunked(nn.Module):
    """Its MLP is a method, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.query = Wide(), nn.Linear(WIDTH, WIDTH)

    def feed_forward_chunk(self, x_btd: Tensor) -> Tensor:
        return self.inner(x_btd)

    def forward(self, x_btd: Tensor) -> Tensor:
        return self.feed_forward_chunk(self.query(x_btd).cumsum(1))


def found(block: nn.Module, names: Any = USUAL_NAMES, shape: tuple[int, ...] = (2, 5, WIDTH)) -> list[str]:
    with torch.device("meta"):
        model = nn.Sequential(block)
    places = Mlps(tuple(names)).find(structure_of(model, torch.zeros(shape), list(model)))
    return [".".join(place) for place in places]


@pytest.mark.parametrize("mlp", [Wide, Experts, nn.Identity])
@pytest.mark.parametrize("shape", [(2, 5, WIDTH), (2, 5, 3, WIDTH), (10, WIDTH)])
def test_what_keeps_tokens_apart_is_found(mlp: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    assert found(Block(mlp()), shape=shape) == ["0.mixer.mlp.forward"]


@pytest.mark.parametrize("mlp", [Shift, Places, Normalised, Constant, Pair])
def test_what_mixes_tokens_or_returns_something_else_is_not(mlp: Callable[[], nn.Module]) -> None:
    """Also if a weight of zero hides it at first."""
    assert found(Block(mlp())) == []


def test_a_method_is_found() -> None:
    assert found(Chunked()) == ["0.feed_forward_chunk"]


def test_names_of_the_users_own() -> None:
    block = Block(Wide(), "expand")
    assert found(block) == []
    assert found(block, ["expand"]) == ["0.mixer.expand.forward"]
    assert found(Block(Shift(), "expand"), ["expand"]) == []
    assert found(block, ["forward"]) == ["0.forward"]  # this block does nothing else


def test_the_model_is_left_as_it_was() -> None:
    block = Block(Wide())
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    model = nn.Sequential(block)
    Mlps().find(structure_of(model, torch.zeros(2, 5, WIDTH), list(model)))
    assert "forward" not in vars(block.mixer["mlp"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())


TEXTS = DataSpec(Modality.TOKENS, 300, (8,))
SPECS = {
    "gpt2": TEXTS,
    "llama": TEXTS,
    "gpt_neox": TEXTS,
    "bert": DataSpec(Modality.LABELLED_TOKENS, 5, (8,), vocab_size=300),
    "t5:pairs": DataSpec(Modality.PAIRS, 300, (8,), vocab_size=300, layout=pairs_layout(8, 8)),
    "vit": DataSpec(Modality.IMAGES, 5, (3, 16, 16)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "wanted", "method"),
    [
        ("gpt2", "transformer.h.0.mlp", "forward"),
        ("llama", "model.layers.0.mlp", "forward"),
        ("gpt_neox", "gpt_neox.layers.0.mlp", "forward"),
        ("bert", "bert.encoder.layer.0", "feed_forward_chunk"),
        ("t5:pairs", "encoder.block.0.layer.1.DenseReluDense", "forward"),
        ("vit", "vit.layers.0.mlp", "forward"),
    ],
)
def test_those_of_transformers(kind: str, wanted: str, method: str) -> None:
    problem = Auto().pose(HfConfig(tiny(kind)), SPECS[kind])
    model = bare_model(problem)
    known = problem.structure(model)
    assert known.get(Mlps())[0] == (wanted, method)
    assert len(known.get(Mlps())) == len(known.blocks)


def test_a_resnet_has_none() -> None:
    assert PROBLEMS["resnet"].structure(bare_model(PROBLEMS["resnet"])).get(Mlps()) == ()
