"""Units of inner widths: a model without them computes what the same model computes with zeros in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowvram.config.errors import BadInput
from lowvram.data.spec import DataSpec
from lowvram.models.builtin import OwnModel
from lowvram.models.resnet import BlockKind, NormKind, ResNetConfig
from lowvram.models.transformer import Positions, TransformerConfig
from lowvram.models.widths import InnerWidth, num_kept, sliced
from lowvram.tasks import Auto
from tests.laboratory import IMAGES, TOKENS, knobs_of, make_batch, peak_as_measured, peak_as_planned

WORDS = TransformerConfig(num_layers=2, width=24, num_heads=4, context=8)
PICTURES = ResNetConfig(layers=[2, 1], width=8, image_size=8)
MODELS: dict[str, tuple[OwnModel, DataSpec]] = {
    "transformer": (WORDS, TOKENS),
    "transformer, learned positions": (replace(WORDS, positions=Positions.learned), TOKENS),
    "transformer, grouped heads": (replace(WORDS, num_kv_heads=2), TOKENS),
    "transformer, shared layers": (replace(WORDS, num_layers=3, num_distinct_layers=2, embedding_width=8), TOKENS),
    "transformer, pruned before": (replace(WORDS, num_heads=2, head_width=6, mlp_width=32), TOKENS),
    "resnet": (PICTURES, IMAGES),
    "resnet, frozen norms": (replace(PICTURES, norm=NormKind.frozen, channels_last=True), IMAGES),
    "resnet, bottlenecks": (replace(PICTURES, block=BlockKind.bottleneck), IMAGES),
}


def filled(config: OwnModel, spec: DataSpec) -> Any:
    """A model in fp64 and in evaluation mode, in which every value counts, those of norms too."""
    model, draw = config.make(spec).double().eval(), torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            values = torch.rand(tensor.shape, generator=draw, dtype=torch.float64)
            tensor.copy_(values + 0.5 if "norm" in name else values - 0.5)
    return model


def zeroed(state: dict[str, Tensor], widths: Sequence[InnerWidth], kept: Sequence[Tensor]) -> dict[str, Tensor]:
    """The tensors with zeros wherever a unit is that leaves."""
    masked = {name: tensor.clone() for name, tensor in state.items()}
    for width, units in zip(widths, kept, strict=True):
        left = [unit for unit in range(width.num_units) if unit not in units.tolist()]
        for name, dim, places in width.slices():
            masked[name].index_fill_(dim, places[left].flatten(), 0.0)
    return masked


@pytest.mark.parametrize("name", MODELS)
def test_sliced_and_masked_models_agree(name: str) -> None:
    config, spec = MODELS[name]
    small, widths, draw = config.pruned(0.5, 4), config.inner_widths(), torch.Generator().manual_seed(1)
    numbers = [width.num_units for width in small.inner_widths()]
    assert all(0 < number < width.num_units for number, width in zip(numbers, widths, strict=True))
    kept = [torch.randperm(width.num_units, generator=draw)[:n] for width, n in zip(widths, numbers, strict=True)]
    inputs = make_batch(spec, 3, dtype=torch.float64).inputs
    model = filled(config, spec)
    whole = model(inputs)
    model.load_state_dict(zeroed(model.state_dict(), widths, kept))
    masked, smaller = model(inputs), small.make(spec).double().eval()
    smaller.load_state_dict(sliced(filled(config, spec).state_dict(), widths, kept))
    assert (smaller(inputs) - masked).abs().max() <= 1e-12 * masked.abs().max()
    assert (whole - masked).abs().max() > 1e-3 * masked.abs().max()  # what has left was used
    before, after = (sum(tensor.numel() for tensor in each.parameters()) for each in (model, smaller))
    assert after < 0.85 * before


@pytest.mark.parametrize("name", ["transformer, grouped heads", "resnet"])
def test_the_planner_prices_the_smaller_model(name: str) -> None:
    config, spec = MODELS[name]
    whole, pruned = (Auto().pose(model, spec) for model in (config, config.pruned(0.5, 4)))
    knobs = knobs_of()
    measured, planned = peak_as_measured(pruned, knobs, 4), peak_as_planned(pruned, knobs, 4)
    assert planned.peak_bytes == measured.peak_bytes < peak_as_planned(whole, knobs, 4).peak_bytes


def test_heads_leave_with_the_queries_that_they_serve() -> None:
    small = replace(WORDS, num_heads=6, num_kv_heads=3).pruned(0.5, 8)
    assert (small.num_heads, small.num_kv_heads, small.head_width) == (4, 2, 4)
    assert replace(WORDS, num_kv_heads=1).pruned(0.5, 8).num_heads == WORDS.num_heads  # there is only one such head


@pytest.mark.parametrize(
    ("num_units", "ratio", "multiple", "expected"),
    [
        *[(384, 0.5, 8, 192), (384, 0.3, 8, 272), (64, 0.99, 8, 8), (8, 0.5, 8, 8), (6, 0.5, 8, 6), (100, 0.0, 8, 100)],
        *[(3, 0.5, 1, 2), (10, 0.9, 1, 1), (12, 0.99, 1, 1)],
    ],
)
def test_widths_are_rounded_to_multiples(num_units: int, ratio: float, multiple: int, expected: int) -> None:
    assert num_kept(num_units, ratio, multiple) == expected


def test_group_norms_are_refused() -> None:
    with pytest.raises(BadInput, match=r"^model\.norm='group': must be batch or frozen"):
        replace(PICTURES, norm=NormKind.group).pruned(0.5, 4)
