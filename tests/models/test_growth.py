"""Deeper models from trained ones: which blocks are copied where, and what the result computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowvram.config.errors import BadInput
from lowvram.config.transforms import GrowthKind
from lowvram.models.builtin import OwnModel
from lowvram.models.growth import Source, sources, values_of
from lowvram.models.remade import Trained
from lowvram.models.resnet import NormKind, ResNetConfig
from lowvram.models.transformer import TransformerConfig
from tests.laboratory import make_batch
from tests.models.test_widths import MODELS, filled

STACK, INTERLEAVE, IDENTITY = GrowthKind.stack, GrowthKind.interleave, GrowthKind.identity
GROWING = sorted(MODELS.keys() - {"transformer, shared layers"})


def deeper(name: str, factor: int, how: GrowthKind) -> nn.Module:
    """In fp64 and in evaluation mode."""
    config, spec = MODELS[name]
    model = filled(config, spec)
    grown = config.deeper(Trained(model, spec, lambda: None), factor, how)
    made = grown.config.make(spec).double().eval()
    made.load_state_dict(values_of(grown.tensors, model.state_dict()))
    return made


@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("name", [name for name in GROWING if "frozen" not in name])
def test_with_idle_blocks_a_model_computes_what_it_did(name: str, factor: int) -> None:
    config, spec = MODELS[name]
    inputs = make_batch(spec, 3, dtype=torch.float64).inputs
    before, model = filled(config, spec)(inputs), deeper(name, factor, IDENTITY)
    after = model(inputs)
    assert (after - before).abs().max() <= 1e-12 * before.abs().max()
    after.sum().backward()
    stuck = [name for name, weight in model.named_parameters() if weight.grad is None]
    zero = {name for name, weight in model.named_parameters() if not weight.any()}
    assert not stuck
    assert zero
    assert all(model.get_parameter(name).grad.any() for name in zero)  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("how", [STACK, INTERLEAVE])
@pytest.mark.parametrize("name", GROWING)
def test_copied_blocks_compute_what_the_old_ones_do(name: str, how: GrowthKind) -> None:
    config, spec = MODELS[name]
    inputs, model = make_batch(spec, 3, dtype=torch.float64).inputs, filled(config, spec)
    found = deeper(name, 2, how)(inputs)
    order = sources(config.runs_of_blocks(), len(model.blocks), 2, how)
    whole = model(inputs)
    model.blocks = nn.ModuleList(model.blocks[source.block] for source in order)
    if isinstance(config, TransformerConfig):
        model.num_layers = len(order)
    assert found.equal(model(inputs))
    assert not found.equal(whole)


def blocks_of(config: OwnModel, num_blocks: int, factor: int, how: GrowthKind) -> list[int]:
    return [source.block for source in sources(config.runs_of_blocks(), num_blocks, factor, how)]


def test_where_copies_stand() -> None:
    words = TransformerConfig(num_layers=3)
    assert blocks_of(words, 3, 2, STACK) == [0, 1, 2, 0, 1, 2]
    assert blocks_of(words, 3, 2, INTERLEAVE) == [0, 0, 1, 1, 2, 2]
    assert sources(words.runs_of_blocks(), 2 + 1, 2, IDENTITY)[:3] == [
        Source(0, is_idle=False),
        Source(0, is_idle=True),
        Source(1, is_idle=False),
    ]
    pictures = ResNetConfig(layers=[2, 1, 3])
    assert pictures.grown(2, STACK).layers == [4, 1, 5]
    assert blocks_of(pictures, 6, 2, STACK) == [0, 1, 0, 1, 2, 3, 4, 5, 4, 5]
    assert blocks_of(pictures, 6, 2, INTERLEAVE) == [0, 0, 1, 1, 2, 3, 4, 4, 5, 5]


def test_what_can_not_be_grown_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^model\.num_distinct_layers=2: must be null where blocks are copied"):
        TransformerConfig(num_layers=4, num_distinct_layers=2).grown(2, STACK)
    frozen = ResNetConfig(norm=NormKind.frozen)
    with pytest.raises(BadInput, match=r"^grow\.how='identity': must be stack or interleave with model\.norm=frozen"):
        frozen.grown(2, IDENTITY)
    assert frozen.grown(2, STACK).layers == [6, 5, 5, 5]


def test_values_of_the_rest_stay() -> None:
    before, after = filled(*MODELS["resnet"]).state_dict(), deeper("resnet", 2, STACK).state_dict()
    rest = {name: tensor for name, tensor in before.items() if "blocks" not in name}
    assert rest
    assert all(after[name].equal(tensor) for name, tensor in rest.items())
