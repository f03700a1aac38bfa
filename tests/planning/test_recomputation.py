"""recomputation: the fewest blocks, compared with trying all subsets, on made-up memory and on traced models."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest
import torch

from lowvram.core.assemble import block_names
from lowvram.knobs.ckpt import RecomputeChosen
from lowvram.models.resnet import ResNetConfig
from lowvram.models.transformer import TransformerConfig
from lowvram.planning.recomputation import (
    BlockMemory,
    StepMemory,
    best_blocks,
    fewest_blocks,
    owner_of,
    peak_with,
    step_memory,
)
from lowvram.planning.target import Target
from lowvram.planning.trace.events import Trace
from lowvram.planning.trace.tracer import trace
from lowvram.tasks import Auto, Problem
from tests.laboratory import IMAGES, TOKENS, knobs_of

MODELS: dict[str, Problem] = {
    "transformer": Auto().pose(TransformerConfig(num_layers=4, width=16, num_heads=2, context=8), TOKENS),
    "resnet": Auto().pose(ResNetConfig(layers=[2, 2], width=8, image_size=8), IMAGES),
}
BATCH_SIZE = 16


def subsets(num_blocks: int) -> Iterator[tuple[int, ...]]:
    """All, the smallest first."""
    for size in range(num_blocks + 1):
        yield from combinations(range(num_blocks), size)


@pytest.mark.parametrize("seed", range(20))
def test_no_smaller_set_fits(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def number(largest: int) -> int:
        return int(torch.randint(largest, (), generator=draw))

    blocks = [BlockMemory(number(50), number(200), number(200)) for _ in range(7)]
    memory = StepMemory(blocks, number(300))
    for budget in range(0, 300, 15):
        wanted = next((len(each) for each in subsets(7) if peak_with(memory, each) <= budget), None)
        found = fewest_blocks(memory, budget)
        assert (None if found is None else len(found)) == wanted
        assert found is None or peak_with(memory, found) <= budget


def test_the_best_blocks_of_each_number_have_the_lowest_peak() -> None:
    blocks = [BlockMemory(size, 10, 10) for size in (5, 20, 10)]
    assert best_blocks(StepMemory(blocks, 100)) == [(), (1,), (1, 2), (0, 1, 2)]
    assert best_blocks(StepMemory(blocks, 0)) == [()]  # all the same


def traced(model: str, blocks: tuple[int, ...], accum: str = "none") -> Trace:
    return trace(MODELS[model], knobs_of(ckpt=RecomputeChosen(list(blocks)), accum=accum), BATCH_SIZE, Target())


def peak_of(model: str, blocks: tuple[int, ...]) -> int:
    return traced(model, blocks).sums(is_steady=True).peak_bytes


@pytest.mark.parametrize("model", MODELS)
def test_of_traced_models_no_smaller_set_fits(model: str) -> None:
    """Each of the sixteen sets of four blocks is traced itself."""
    names = block_names(MODELS[model], knobs_of())
    every = tuple(range(len(names)))
    memory = step_memory(traced(model, ()), traced(model, every), names)
    peaks = {blocks: peak_of(model, blocks) for blocks in subsets(len(names))}
    least, most = peaks[every], peaks[()]
    sizes = []
    for share in range(11):
        budget = least + (most - least) * share // 10
        wanted = next(len(blocks) for blocks, peak in peaks.items() if peak <= budget)
        found = fewest_blocks(memory, budget)
        assert found is not None
        assert len(found) == wanted
        assert peaks[found] <= budget
        sizes.append(len(found))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 0
    assert len(set(sizes)) >= 3


@pytest.mark.parametrize("model", MODELS)
def test_of_several_parts_the_last_one_counts(model: str) -> None:
    names = block_names(MODELS[model], knobs_of())
    every = tuple(range(len(names)))
    memory = step_memory(traced(model, (), "x2"), traced(model, every, "x2"), names)
    whole = traced(model, (), "x2").sums(is_steady=True).peak_bytes
    assert peak_with(memory, ()) == whole
    assert all(block.freed_bytes > 0 for block in memory.blocks)


def test_modules_belong_to_blocks_by_whole_names() -> None:
    blocks = [f"layers.{number}" for number in range(12)]
    assert [owner_of(name, blocks) for name in ("layers.1", "layers.11.mlp", "layers", "norm", "")] == [
        1,
        11,
        -1,
        -1,
        -1,
    ]
