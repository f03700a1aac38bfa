"""ckpt=selective: which operators run again, and what is kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from lowvram.compat.torch_modes import TorchDispatchMode
from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.ledger import ledger
from lowvram.core.step import step
from lowvram.knobs.ckpt import (
    Selective,
)
from lowvram.knobs.ckpt.selective import policy
from tests.laboratory import (
    CPU,
    FIVE_BLOCKS,
    knobs_of,
    make_batch,
    relative_error,
    train,
)

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
    assert [index for index, block in enumerate(task.structure(model).blocks) if "forward" in vars(block)] == treated


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
def test_a_second_walk_through_the_graph_gives_the_same_gradients(problem: str) -> None:
    """What selective keeps is gone after the first walk: the second one computes it again."""
    task = FIVE_BLOCKS[problem]
    batch = make_batch(task.spec, 2)
    for option in ("every1", "selective"):
        rig = assemble(task, knobs_of(ckpt=option), CPU)
        loss = rig.criterion(rig.forward(batch), batch)
        loss.backward(retain_graph=True)
        once = {name: each.grad.clone() for name, each in rig.model.named_parameters() if each.grad is not None}
        loss.backward()
        for name, parameter in rig.model.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, 2 * once[name])
