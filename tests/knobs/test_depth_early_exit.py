"""depth=early_exit: the losses of training, and where an evaluation leaves the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.knob import Knob, conflicts
from lowvram.core.probes.stated import TAIL
from lowvram.core.rig import IGNORE, Rig
from lowvram.core.step import step
from lowvram.knobs.depth import EarlyExit
from lowvram.knobs.depth.early_exit import first_sure
from lowvram.knobs.sharding.find_segments import FindSegments, names_of
from lowvram.models.resnet import NormKind
from lowvram.tasks import Auto, Problem
from tests.laboratory import (
    CPU,
    IMAGES,
    PROBLEMS,
    RESNET,
    TRANSFORMER,
    InDouble,
    Trained,
    knobs_of,
    make_batch,
    named,
    peak_as_measured,
    peak_as_planned,
    relative_error,
    train,
)
from tests.ranks import on_ranks

DEEP: dict[str, Problem] = {
    "transformer": PROBLEMS["transformer"],
    "resnet": Auto().pose(replace(RESNET, layers=[1, 3], norm=NormKind.group), IMAGES),
}
BOTH = {"transformer": EarlyExit([0, 1]), "resnet": EarlyExit([1, 2])}


def rig_of(problem: str, **choices: str | Knob) -> Rig:
    return assemble(DEEP[problem], knobs_of(**choices), CPU)


@pytest.mark.parametrize("problem", DEEP)
def test_the_loss_is_the_sum_over_exits(problem: str) -> None:
    """Each computed by a model that ends there."""
    knob, batch = replace(BOTH[problem], weight=0.25), make_batch(DEEP[problem].spec, 6)
    plain = rig_of(problem)
    blocks, tail = plain.structure.blocks, plain.structure.get(TAIL)
    assert tail is not None
    outputs = {}
    for number, block in enumerate(blocks):
        block.register_forward_hook(lambda _, __, output, number=number: outputs.update({number: output}))
    with torch.no_grad():
        plain.forward(batch)
        losses = [
            plain.criterion(getattr(plain.model, tail.method)(outputs[number]), batch)
            for number in (*(knob.exits or []), len(blocks) - 1)
        ]
    wanted = (losses[-1] + 0.25 * (losses[0] + losses[1])) / batch.num_targets
    assert step(rig_of(problem, depth=knob), batch)[0] == pytest.approx(float(wanted), rel=1e-6)


def test_without_weight_it_is_the_plain_run() -> None:
    found, wanted = (
        train(PROBLEMS["transformer"], knobs_of(depth=depth, optimizer="sgd"), [8] * 3)
        for depth in (EarlyExit(weight=0.0), "none")
    )
    assert found.losses == wanted.losses
    assert relative_error(found.gradients, wanted.gradients) == 0


@pytest.mark.parametrize("problem", DEEP)
def test_gradients_are_those_in_fp64(problem: str) -> None:
    knobs = knobs_of(depth=BOTH[problem], optimizer="sgd")
    found, wanted = (train(task, knobs, [8]) for task in (DEEP[problem], InDouble(DEEP[problem])))
    assert 0 < relative_error(found.gradients, wanted.gradients) < 1e-5


@pytest.mark.parametrize("others", [{"accum": "x4"}, {"ckpt": "every1"}, {"stepping": "in_backward"}], ids=str)
@pytest.mark.parametrize("problem", DEEP)
def test_other_knobs_keep_its_numbers(problem: str, others: dict[str, Any]) -> None:
    one, other = (
        train(DEEP[problem], knobs_of(depth=BOTH[problem], optimizer="sgd", **choices), [16, 13], lr=0.01)
        for choices in (others, {})
    )
    assert relative_error(one.gradients, other.gradients) < 2e-6


@pytest.mark.slow  # the loss of a rank's slice is that of a part, which `test_other_knobs_keep_its_numbers` tries
def test_ranks_give_the_step_of_the_whole_batch() -> None:
    choices = [knobs_of(depth=BOTH["transformer"], sharding=name, optimizer="sgd") for name in ("ddp", "fsdp")]
    wanted = train(DEEP["transformer"], knobs_of(depth=BOTH["transformer"], optimizer="sgd"), [8] * 2)
    for of_rank in on_ranks(train_all, DEEP["transformer"], choices):
        for found in of_rank:
            assert relative_error(found.parameters, wanted.parameters) < 1e-5


def train_all(task: Problem, choices: list[dict[str, Knob]]) -> list[Trained]:
    return [train(task, knobs, [8] * 2) for knobs in choices]


@pytest.mark.parametrize("problem", DEEP)
def test_without_chained_blocks(problem: str) -> None:
    """A stage of a pipeline is given what the stage before has made last, and nothing of earlier blocks."""
    rig = rig_of(problem, depth=BOTH[problem])
    with pytest.raises(Incompatible, match=r"what stands after the blocks reads what \S+ has made"):
        rig.structure.get(FindSegments(names_of(rig.model)))
    why = conflicts(named(("depth", "early_exit"), ("sharding", "pipeline")), {})
    assert why == [
        "sharding=pipeline needs that only the next block reads what a block has made, and depth=early_exit ends that"
    ]


@pytest.mark.parametrize("problem", DEEP)
def test_a_plan_is_what_is_measured(problem: str) -> None:
    knobs = knobs_of(depth=BOTH[problem])
    planned = peak_as_planned(DEEP[problem], knobs, 8).peak_bytes
    assert planned == peak_as_measured(DEEP[problem], knobs, 8).peak_bytes
    plain = peak_as_planned(DEEP[problem], knobs_of(), 8).peak_bytes
    assert planned > plain or (problem == "resnet" and planned == plain)  # which has few logits


# Evaluations


def test_each_target_takes_the_first_exit_that_is_sure() -> None:
    sure, unsure = torch.tensor([9.0, 0.0, 0.0]), torch.tensor([1.0, 0.0, 0.0])
    logits = [torch.stack(each) for each in ([sure, unsure, unsure], [-sure, sure, unsure], [-unsure, -unsure, unsure])]
    chosen, share = first_sure(logits, [0.25, 0.5, 1.0], threshold=0.9)
    assert chosen.equal(torch.stack([sure, sure, unsure]))
    assert share.tolist() == [0.25, 0.5, 1.0]
    assert first_sure(logits, [0.25, 0.5, 1.0], threshold=0.0)[1].tolist() == [0.25] * 3
    assert first_sure(logits, [0.25, 0.5, 1.0], threshold=1.0)[1].tolist() == [1.0] * 3


def test_targets_that_do_not_count_use_no_blocks() -> None:
    rig = rig_of("transformer", depth=EarlyExit([0], threshold=0.0))
    batch = make_batch(DEEP["transformer"].spec, 6)
    rig.model.eval()
    with torch.no_grad():
        rig.forward(batch)
    num_counted = (batch.targets != IGNORE).sum()
    assert num_counted < batch.targets.numel()
    assert rig.eval_means["blocks_used"](batch) == pytest.approx(float(num_counted) / 3)


# What is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EarlyExit([]), r"depth\.exits=\[\]: must be null"),
        (lambda: EarlyExit([2, 1]), r"depth\.exits=\[2, 1\]"),
        (lambda: EarlyExit([-1]), r"depth\.exits=\[-1\]"),
        (lambda: EarlyExit(weight=-1.0), r"depth\.weight=-1\.0: must be at least 0"),
        (lambda: EarlyExit(threshold=2.0), r"depth\.threshold=2\.0: must be a probability"),
        (lambda: rig_of("transformer", depth=EarlyExit([2])), r"depth\.exits=\[2\]: .* some of \[0, 1\]"),
        (lambda: rig_of("resnet", depth=EarlyExit([0])), r"depth\.exits=\[0\]: .* some of \[1, 2\]"),
    ],
)
def test_values_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"logits": "chunked"}, "needs that the logits of a part exist whole"),
        ({"logits": "tiled"}, "needs that the logits of a part exist whole"),
    ],
)
def test_what_does_not_go_with_it_is_refused(choices: dict[str, str], message: str) -> None:
    with pytest.raises(Incompatible, match=message):
        rig_of("transformer", depth=EarlyExit(), **choices)


def test_models_without_an_earlier_place_for_the_head_are_refused() -> None:
    shared = Auto().pose(replace(TRANSFORMER, num_distinct_layers=2), PROBLEMS["transformer"].spec)
    for problem in (PROBLEMS["resnet"], shared):
        with pytest.raises(Incompatible, match=r"needs that the head takes .* earlier block, too: .* depth=none$"):
            assemble(problem, knobs_of(depth=EarlyExit()), CPU)


def test_the_row_says_which_loss_it_is() -> None:
    model = PROBLEMS["transformer"].make_model()
    assert EarlyExit().caveat(model).startswith("the loss of one earlier exit counts 0.3 times beside")
    assert EarlyExit([0, 1]).caveat(model).startswith("the loss of 2 earlier exits counts")
