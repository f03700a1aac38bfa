"""ckpt: which blocks are computed again, that not a bit changes, and what is saved."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import CheckpointPolicy

from lowvram.compat.torch_modes import TorchDispatchMode
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.knob import Kind
from lowvram.core.ledger import ledger
from lowvram.core.step import step
from lowvram.knobs.ckpt import (
    CompilerBudget,
    RecomputeChosen,
    RecomputeEvery,
    RecomputeSegments,
    RunningStatsFrozen,
    Selective,
    policy,
    recompute,
)
from lowvram.models.resnet import ResNetConfig
from lowvram.models.transformer import TransformerConfig
from lowvram.tasks import Auto, Problem
from tests.laboratory import (
    CPU,
    IMAGES,
    PROBLEMS,
    TOKENS,
    compiler_as_before,
    knobs_of,
    make_batch,
    relative_error,
    saved_bytes,
    train,
)

NUM_STEPS = 20


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("problem", ["transformer_dropout", "resnet"])
@pytest.mark.parametrize("option", ["every1", "every2", "sqrt", "selective"])
def test_twenty_steps_are_the_same_to_the_last_bit(option: str, problem: str, precision: str) -> None:
    """Losses, parameters, BatchNorm's statistics; with dropout."""
    task = PROBLEMS[problem]
    found, wanted = (
        train(task, knobs_of(ckpt=ckpt, precision=precision), [4] * NUM_STEPS) for ckpt in (option, "none")
    )
    assert found.losses == wanted.losses
    assert relative_error(found.parameters, wanted.parameters) == 0
    assert relative_error(found.buffers, wanted.buffers) == 0


FIVE_BLOCKS: dict[str, Problem] = {
    "transformer": Auto().pose(TransformerConfig(num_layers=5, width=8, num_heads=1, context=8), TOKENS),
    "resnet": Auto().pose(ResNetConfig(layers=[5], width=8, image_size=8), IMAGES),
}


@pytest.mark.parametrize("problem", FIVE_BLOCKS)
@pytest.mark.parametrize(
    ("every", "recomputed"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3]), (4, [0, 4]), (9, [0])]
)
def test_block_i_is_computed_again_when_i_divides(every: int, recomputed: list[int], problem: str) -> None:
    task, calls = FIVE_BLOCKS[problem], Counter[int]()
    rig = assemble(task, knobs_of(ckpt=RecomputeEvery(every)), CPU)
    for index, block in enumerate(task.blocks(rig.model)):
        inside = next(module for module in block.modules() if isinstance(module, nn.Linear | nn.Conv2d))
        inside.register_forward_hook(lambda *_, index=index: calls.update([index]))
    step(rig, make_batch(task.spec, 2))
    assert [index for index in range(5) if calls[index] == 2] == recomputed
    assert set(calls.values()) <= {1, 2}


@pytest.mark.parametrize("every", [0, -1])
def test_every_is_at_least_one(every: int) -> None:
    with pytest.raises(BadInput, match=rf"ckpt\.every={every}: must be at least 1"):
        RecomputeEvery(every)


@pytest.mark.parametrize("problem", FIVE_BLOCKS)
def test_fewer_saved_tensors_the_more_blocks_are_computed_again(problem: str) -> None:
    task = FIVE_BLOCKS[problem]
    batch = make_batch(task.spec, 16)
    saved = [saved_bytes(task, knobs_of(ckpt=option), batch) for option in ("none", "every4", "every2", "every1")]
    assert saved == sorted(set(saved), reverse=True)


@pytest.mark.parametrize("problem", FIVE_BLOCKS)
def test_activations_fall_by_two_fifths(problem: str) -> None:
    activations = {}
    for option in ("none", "every2", "every1"):
        task = FIVE_BLOCKS[problem]
        rig, batch = assemble(task, knobs_of(ckpt=option), CPU), make_batch(task.spec, 64)
        with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
            step(rig, batch)
        activations[option] = peak.by_kind_max[Kind.ACTIVATIONS]
    assert activations["none"] > activations["every2"] > activations["every1"]
    assert activations["every1"] <= 0.6 * activations["none"]


# Segments


@pytest.mark.parametrize("problem", FIVE_BLOCKS)
@pytest.mark.parametrize(("segment", "num_calls"), [(None, [3, 2, 3, 2, 2]), (3, [3, 3, 2, 3, 2]), (1, [2] * 5)])
def test_all_but_the_last_block_of_a_segment_run_three_times(
    segment: int | None, num_calls: list[int], problem: str
) -> None:
    """Of five blocks the square root is two."""
    task, calls = FIVE_BLOCKS[problem], Counter[int]()
    rig = assemble(task, knobs_of(ckpt=RecomputeSegments(segment)), CPU)
    for index, block in enumerate(task.blocks(rig.model)):
        inside = next(module for module in block.modules() if isinstance(module, nn.Linear | nn.Conv2d))
        inside.register_forward_hook(lambda *_, index=index: calls.update([index]))
    for _ in range(2):
        calls.clear()
        step(rig, make_batch(task.spec, 2))
        assert [calls[index] for index in range(5)] == num_calls


SIXTEEN_BLOCKS = Auto().pose(TransformerConfig(num_layers=16, width=32, num_heads=1, context=8), TOKENS)


def test_of_sixteen_blocks_seven_boundaries_are_alive_at_most() -> None:
    """The first inputs of four segments, and three more inside the last one; with every1 all sixteen."""
    activations, batch = {}, make_batch(TOKENS, 16)
    for option in ("every1", "sqrt"):
        rig = assemble(SIXTEEN_BLOCKS, knobs_of(ckpt=option), CPU)
        with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
            step(rig, batch)
        activations[option] = peak.by_kind_max[Kind.ACTIVATIONS]
    assert activations["every1"] - activations["sqrt"] == 9 * (16 * 8 * 32 * 4)


def test_segments_follow_each_part_of_a_batch() -> None:
    found, wanted = (
        train(PROBLEMS["transformer_dropout"], knobs_of(ckpt=ckpt, accum="x4"), [8, 7])
        for ckpt in (RecomputeSegments(3), "none")
    )
    assert found.losses == wanted.losses
    assert relative_error(found.gradients, wanted.gradients) == 0


@pytest.mark.parametrize("segment", [0, -2])
def test_a_segment_has_at_least_one_block(segment: int) -> None:
    with pytest.raises(BadInput, match=rf"ckpt\.segment={segment}: must be null .* or at least 1"):
        RecomputeSegments(segment)


@pytest.mark.parametrize("ends", [{"compile": "blocks"}, {"offload": "parameters"}], ids=str)
def test_what_segments_cant_be_had_with_is_refused(ends: dict[str, str]) -> None:
    ((group, option),) = ends.items()
    with pytest.raises(Incompatible, match=rf"ckpt=sqrt needs that .*, and {group}={option} ends that"):
        assemble(PROBLEMS["transformer"], knobs_of(ckpt="sqrt", **ends), CPU)


# The compiler's choice


@pytest.mark.parametrize("budget", [-0.1, 1.0, float("nan")])
def test_a_budget_is_a_share(budget: float) -> None:
    with pytest.raises(BadInput, match=rf"ckpt\.budget={budget}: must be at least 0 .* and below 1"):
        CompilerBudget(budget)


def test_a_budget_with_dropout_is_refused() -> None:
    with pytest.raises(Incompatible, match=r"ckpt=compiler needs that the model draws no random numbers: .*dropout=0"):
        assemble(PROBLEMS["transformer_dropout"], knobs_of(ckpt="compiler"), CPU)
    with compiler_as_before():
        assemble(PROBLEMS["transformer"], knobs_of(ckpt="compiler"), CPU)


def test_with_a_budget_gradients_would_be_of_another_mask() -> None:
    """The reason of that refusal, on torch 2.13: pytorch#190758. When this fails, torch has mended it."""
    x = torch.ones(64, 64, requires_grad=True)
    with compiler_as_before(), functorch_config.patch(activation_memory_budget=0.5):
        masked = torch.compile(lambda x: nn.functional.dropout(x.sin().cos(), 0.5), backend="aot_eager")(x)
        masked.sum().backward()
    assert x.grad is not None
    assert not torch.equal(masked == 0, x.grad == 0)


# BatchNorm


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_updated_once(momentum: float | None) -> None:
    def run(is_recomputed: bool) -> nn.Module:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU())
        x = torch.randn(8, 3, 6, 6, requires_grad=True)
        if is_recomputed:
            recompute(block)
        for _ in range(3):
            block(x).sum().backward()
        return block

    assert relative_error(dict(run(True).named_buffers()), dict(run(False).named_buffers())) == 0


def test_a_second_backward_pass_holds_them_too() -> None:
    norm = nn.BatchNorm1d(3)
    recompute(norm)
    loss = norm(torch.randn(4, 3, requires_grad=True)).square().sum()
    after_forward = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    loss.backward(retain_graph=True)
    loss.backward()
    assert relative_error(dict(norm.named_buffers()), after_forward) == 0


def test_an_exception_in_a_recomputation_leaves_momentum_as_it_was() -> None:
    norm = nn.BatchNorm1d(3)
    with suppress(KeyError), RunningStatsFrozen([norm]):
        assert norm.momentum == 0.0
        raise KeyError
    assert norm.momentum == 0.1


def test_evaluation_works_too() -> None:
    """Without gradients there is nothing to compute again."""
    rig, plain = (assemble(PROBLEMS["resnet"], knobs_of(ckpt=ckpt), CPU) for ckpt in ("every1", "none"))
    batch = make_batch(IMAGES, 4)
    rig.model.eval()
    plain.model.eval()
    with torch.no_grad():
        assert torch.equal(rig.forward(batch), plain.forward(batch))


# selective

ATEN = torch.ops.aten


class Calls(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def counted(problem: str, option: str) -> Counter[Any]:
    """The operators of one step."""
    task = FIVE_BLOCKS[problem]
    rig, batch = assemble(task, knobs_of(ckpt=option), CPU), make_batch(task.spec, 2)
    with Calls() as calls:
        step(rig, batch)
    return calls.counts


def test_a_transformer_computes_no_product_and_no_attention_again() -> None:
    plain, selective, every1 = (counted("transformer", option) for option in ("none", "selective", "every1"))
    for operator in (ATEN.addmm.default, ATEN.mm.default, ATEN._scaled_dot_product_flash_attention_for_cpu.default):
        assert selective[operator] == plain[operator] > 0
    assert selective[ATEN.gelu.default] == every1[ATEN.gelu.default] == 2 * plain[ATEN.gelu.default] == 2 * 5
    norms, last_norm = 2 * 5, 1  # no block
    assert plain[ATEN.native_layer_norm.default] == norms + last_norm
    assert selective[ATEN.native_layer_norm.default] == 2 * norms + last_norm
    # all but the last product of each block, whose result nobody needs in the backward pass
    assert every1[ATEN.addmm.default] == plain[ATEN.addmm.default] + 3 * 5


def test_a_resnet_computes_no_convolution_again() -> None:
    plain, selective, every1 = (counted("resnet", option) for option in ("none", "selective", "every1"))
    assert selective[ATEN.convolution.default] == plain[ATEN.convolution.default] == 1 + 2 * 5
    assert every1[ATEN.convolution.default] > plain[ATEN.convolution.default]
    assert selective[ATEN.relu_.default] > plain[ATEN.relu_.default]


def bytes_after_forward(option: str) -> int:
    """All activations that are alive between the forward and the backward pass of 16 samples."""
    task, large = FIVE_BLOCKS["transformer"], 2**24
    rig, batch = assemble(task, knobs_of(ckpt=option), CPU), make_batch(task.spec, 16)
    with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
        outputs = rig.forward(batch)
        torch.empty(large, dtype=torch.int8)  # so the peak is here
        del outputs
    return peak.by_kind[Kind.ACTIVATIONS] - large


def test_what_a_transformer_keeps_selectively_is_known_to_the_byte() -> None:
    """16 samples of 8 tokens, width 8, one head. The input of each block is kept with every1 too."""
    kept = {"qkv": 3 * 8, "attention": 8, "its logarithms of sums": 1, "merge": 8, "up": 4 * 8, "down": 8}
    assert bytes_after_forward("selective") - bytes_after_forward("every1") == 5 * sum(kept.values()) * 16 * 8 * 4


@pytest.mark.parametrize(
    ("fraction", "treated"), [(0.0, []), (0.1, [0]), (0.4, [0, 2]), (0.5, [0, 1, 3]), (1.0, [0, 1, 2, 3, 4])]
)
def test_a_share_of_the_blocks_is_treated_evenly_spread(fraction: float, treated: list[int]) -> None:
    task = FIVE_BLOCKS["transformer"]
    model = assemble(task, knobs_of(ckpt=Selective(fraction)), CPU).model
    assert [index for index, block in enumerate(task.blocks(model)) if "forward" in vars(block)] == treated


@pytest.mark.parametrize("problem", FIVE_BLOCKS)
def test_it_lies_between_nothing_and_everything(problem: str) -> None:
    activations = []
    for option in ("none", Selective(0.5), "selective", "every1"):
        task = FIVE_BLOCKS[problem]
        rig, batch = assemble(task, knobs_of(ckpt=option), CPU), make_batch(task.spec, 64)
        with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
            step(rig, batch)
        activations.append(peak.by_kind_max[Kind.ACTIVATIONS])
    assert activations == sorted(set(activations), reverse=True)


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_share_is_between_nothing_and_everything(fraction: float) -> None:
    with pytest.raises(BadInput, match=rf"ckpt\.fraction={fraction}: must be between 0 .no block. and 1"):
        Selective(fraction)


@pytest.mark.parametrize(("dropout", "kept"), [(0.0, True), (0.1, False)])
def test_attention_that_drops_is_run_again(dropout: float, kept: bool) -> None:
    """The CPU's fused attention never drops; a card's does."""
    wanted = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
    flash = ATEN._scaled_dot_product_flash_attention.default
    efficient = ATEN._scaled_dot_product_efficient_attention.default
    assert policy(None, flash, 1, 2, 3, dropout, True) is wanted
    assert policy(None, flash, 1, 2, 3, dropout_p=dropout) is wanted
    assert policy(None, efficient, 1, 2, 3, None, True, dropout, True) is wanted
    assert policy(None, flash, 1, 2, 3) is CheckpointPolicy.MUST_SAVE


def test_selective_statistics_are_updated_once() -> None:
    found, wanted = (train(FIVE_BLOCKS["resnet"], knobs_of(ckpt=ckpt), [4, 3]) for ckpt in ("selective", "none"))
    assert relative_error(found.buffers, wanted.buffers) == 0
    assert relative_error(found.gradients, wanted.gradients) == 0


@pytest.mark.parametrize("problem", FIVE_BLOCKS)
def test_without_retainable_graph(problem: str) -> None:
    """What selective keeps is gone after the first walk. every1 computes it once more."""
    task = FIVE_BLOCKS[problem]
    batch = make_batch(task.spec, 2)
    for option in ("every1", "selective"):
        rig = assemble(task, knobs_of(ckpt=option), CPU)
        loss = rig.criterion(rig.forward(batch), batch)
        loss.backward(retain_graph=True)
        if option == "every1":
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match=r"backward an extra time|unflatten"):  # the latter: torch 2.11
                loss.backward()


# Chosen blocks


@pytest.mark.parametrize("problem", FIVE_BLOCKS)
@pytest.mark.parametrize(("blocks", "treated"), [(None, [0, 1, 2, 3, 4]), ([], []), ([3, 0], [0, 3])])
def test_these_blocks_are_recomputed(blocks: list[int] | None, treated: list[int], problem: str) -> None:
    task = FIVE_BLOCKS[problem]
    model = assemble(task, knobs_of(ckpt=RecomputeChosen(blocks)), CPU).model
    assert [index for index, block in enumerate(task.blocks(model)) if "forward" in vars(block)] == treated


def test_a_plan_chooses_only_what_was_not_typed() -> None:
    assert RecomputeChosen().with_blocks((0, 2)) == RecomputeChosen([0, 2])
    assert RecomputeChosen([1]).with_blocks((0, 2)) is None
    assert RecomputeEvery().with_blocks(()) is None


@pytest.mark.parametrize("blocks", [[0, 0], [-1]])
def test_blocks_are_different_numbers(blocks: list[int]) -> None:
    with pytest.raises(BadInput, match=r"ckpt\.blocks=.*: must be null \(a plan chooses\) or a list of different"):
        RecomputeChosen(blocks)


def test_blocks_that_the_model_lacks_are_refused() -> None:
    with pytest.raises(
        BadInput, match=r"ckpt\.blocks=\[1, 5\]: must be numbers from 0 to 4, as this model has 5 blocks"
    ):
        assemble(FIVE_BLOCKS["resnet"], knobs_of(ckpt=RecomputeChosen([1, 5])), CPU)
