"""block_memory: what traced models keep by block, against traces of every set of blocks; the time of each block."""

from __future__ import annotations

import pytest

from lowvram.core.assemble import block_names
from lowvram.knobs.ckpt import RecomputeChosen
from lowvram.models.resnet import ResNetConfig
from lowvram.models.transformer import TransformerConfig
from lowvram.planning.block_memory import COST_UNITS, costs, owner_of, step_memory
from lowvram.planning.devices import load_device
from lowvram.planning.recomputation import StepMemory, cheapest_blocks, peak_with
from lowvram.planning.target import Target
from lowvram.planning.time.roofline import DataSheet
from lowvram.planning.trace.events import Trace
from lowvram.planning.trace.tracer import trace
from lowvram.tasks import Auto, Problem
from tests.laboratory import IMAGES, TOKENS, knobs_of
from tests.planning.test_recomputation import subsets

MODELS: dict[str, Problem] = {
    "transformer": Auto().pose(TransformerConfig(num_layers=3, width=16, num_heads=2, context=8), TOKENS),
    "resnet": Auto().pose(ResNetConfig(layers=[2, 1], width=8, image_size=8), IMAGES),
}
BATCH_SIZE = 16


UNKNOWN, CARD = DataSheet(load_device("cpu")), DataSheet(load_device("rtx3060"))


def traced(model: str, blocks: tuple[int, ...], accum: str = "none") -> Trace:
    return trace(MODELS[model], knobs_of(ckpt=RecomputeChosen(list(blocks)), accum=accum), BATCH_SIZE, Target())


def peak_of(model: str, blocks: tuple[int, ...]) -> int:
    return traced(model, blocks).sums(is_steady=True).peak_bytes


def memory_of(model: str, accum: str = "none") -> StepMemory:
    names = block_names(MODELS[model], knobs_of())
    every = tuple(range(len(names)))
    return step_memory(traced(model, (), accum), traced(model, every, accum), names, UNKNOWN)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", MODELS)
def test_of_traced_models_no_smaller_set_fits(model: str) -> None:
    """Each of the eight sets of three blocks is traced itself. As no rate is known, all blocks cost the same."""
    memory = memory_of(model)
    peaks = {blocks: peak_of(model, blocks) for blocks in subsets(len(memory.blocks))}
    least, most = peaks[0, 1, 2], peaks[()]
    sizes = []
    for share in range(11):
        budget = least + (most - least) * share // 10
        wanted = next(len(blocks) for blocks, peak in peaks.items() if peak <= budget)
        found = cheapest_blocks(memory, budget)
        assert found is not None
        assert len(found) == wanted
        assert peaks[found] <= budget
        sizes.append(len(found))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 0
    assert len(set(sizes)) >= 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", MODELS)
def test_of_several_parts_the_last_one_counts(model: str) -> None:
    memory = memory_of(model, "x2")
    assert peak_with(memory, ()) == traced(model, (), "x2").sums(is_steady=True).peak_bytes
    assert all(block.freed_bytes > 0 for block in memory.blocks)


@pytest.mark.parametrize("model", MODELS)
def test_the_forward_passes_of_the_blocks_are_timed(model: str) -> None:
    """Blocks that are alike cost the same, and later stages of a ResNet, whose images are smaller, less than the first.
    Where a rate isn't known, all cost the same."""
    names = block_names(MODELS[model], knobs_of())
    plain = trace(MODELS[model], knobs_of(), 4096, Target())
    assert costs(plain, names, UNKNOWN) == [1, 1, 1]
    of_blocks = costs(plain, names, CARD)
    assert abs(sum(of_blocks) - COST_UNITS) <= len(names)
    if model == "transformer":
        assert len(set(of_blocks)) == 1
    else:
        assert of_blocks[0] == of_blocks[1] > of_blocks[2]


def test_modules_belong_to_blocks_by_whole_names() -> None:
    blocks = [f"layers.{number}" for number in range(12)]
    assert [owner_of(name, blocks) for name in ("layers.1", "layers.11.mlp", "layers", "norm", "")] == [
        1,
        11,
        -1,
        -1,
        -1,
    ]
