"""What holds of distillation for every model: against the plain task, the teacher, parts of a batch, and the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowvram.compress.distillation.teacher import TeacherFormat
from lowvram.config.errors import Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.rig import loss_of
from lowvram.core.step import step
from lowvram.knobs.accum import Parts
from lowvram.knobs.logits import ChunkedLogits
from tests.compress.distillation.teachers import TEACHERS, InDoubleWithTeacher, distilled, rig_after_steps
from tests.laboratory import (
    CPU,
    LARGER,
    PROBLEMS,
    InDouble,
    knobs_of,
    make_batch,
    peak_as_measured,
    peak_as_planned,
    relative_error,
    train,
)

MODELS = list(TEACHERS)
SIZES = [6, 4, 5]
CHUNKED = ChunkedLogits(chunk_tokens=3)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("logits", ["full", CHUNKED], ids=["full", "chunked"])
def test_without_weight_the_teacher_changes_no_bit(model: str, logits: str | ChunkedLogits) -> None:
    with_teacher, plain = (
        train(task, knobs_of(logits=logits), SIZES) for task in (distilled(model, alpha=0.0), PROBLEMS[model])
    )
    assert torch.equal(torch.stack(with_teacher.losses), torch.stack(plain.losses))
    assert relative_error(with_teacher.parameters, plain.parameters) == 0


@pytest.mark.parametrize("logits", ["full", CHUNKED], ids=["full", "chunked"])
def test_of_a_teacher_that_is_the_student_only_targets_are_learnt(logits: str | ChunkedLogits) -> None:
    """The divergence is 0, and so is its gradient. Without BatchNorm, which computes otherwise in a teacher."""
    task = distilled("transformer", PROBLEMS["transformer"], alpha=0.25)
    found, plain = (
        train(each, knobs_of(logits=logits), SIZES[:1])
        for each in (InDoubleWithTeacher(task), InDouble(PROBLEMS["transformer"]))
    )
    torch.testing.assert_close(found.losses[0], 0.75 * plain.losses[0], rtol=1e-12, atol=1e-12)
    wanted = {name: 0.75 * gradient for name, gradient in plain.gradients.items()}
    assert relative_error(found.gradients, wanted) < 1e-12


@pytest.mark.parametrize("model", MODELS)
def test_chunks_are_the_whole(model: str) -> None:
    chunked, full = (
        train(InDoubleWithTeacher(distilled(model)), knobs_of(logits=logits), SIZES) for logits in (CHUNKED, "full")
    )
    torch.testing.assert_close(torch.stack(chunked.losses), torch.stack(full.losses), rtol=1e-12, atol=0)
    assert relative_error(chunked.gradients, full.gradients) < 1e-11


@pytest.mark.parametrize("model", ["transformer", "resnet_group"])
@pytest.mark.parametrize("logits", ["full", CHUNKED], ids=["full", "chunked"])
def test_parts_are_the_whole_batch(model: str, logits: str | ChunkedLogits) -> None:
    task = InDoubleWithTeacher(distilled(model, TEACHERS[model.partition("_")[0]]))
    parts, whole = (train(task, knobs_of(logits=logits, accum=accum), [8, 7]) for accum in (Parts(4), "none"))
    torch.testing.assert_close(torch.stack(parts.losses), torch.stack(whole.losses), rtol=1e-12, atol=0)
    assert relative_error(parts.gradients, whole.gradients) < 1e-11


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("format", list(TeacherFormat))
def test_the_teacher_stays_as_it_is_and_apart(model: str, format: TeacherFormat) -> None:
    rig_after_steps(distilled(model, teacher_format=format), SIZES)


@pytest.mark.parametrize("model", MODELS)
def test_a_student_learns_to_agree(model: str) -> None:
    rig = assemble(distilled(model, alpha=1.0), knobs_of(), CPU)
    rig.stepper.set_lr(1e-2)
    batch = make_batch(PROBLEMS[model].spec, 8)
    losses = [step(rig, batch)[0].item() for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "choice",
    [
        {"activations": "int8"},
        {"offload": "activations"},
        {"offload": "parameters"},
        {"ckpt": "every1"},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"stepping": "in_backward"},
        {"stepping": "zeroth_order"},
        pytest.param({"adapter": "lora"}, marks=pytest.mark.slow),
    ],
    ids=lambda choice: "=".join(*choice.items()),
)
def test_other_knobs_meet_a_teacher(model: str, choice: dict[str, str]) -> None:
    """Without weight the teacher changes no bit; with its weight steps go on."""
    task = distilled(model, alpha=0.0)
    found, plain = (train(each, knobs_of(**choice), SIZES[:2]) for each in (task, PROBLEMS[model]))
    assert torch.equal(torch.stack(found.losses), torch.stack(plain.losses))
    rig = assemble(distilled(model, alpha=1.0), knobs_of(**choice), CPU)
    batch = make_batch(PROBLEMS[model].spec, 8)
    losses = [step(rig, batch)[0] for _ in range(3)]
    assert torch.isfinite(torch.stack(losses)).all()


def test_an_evaluation_asks_no_teacher() -> None:
    rig = assemble(distilled("transformer"), knobs_of(), CPU)
    plain = assemble(PROBLEMS["transformer"], knobs_of(), CPU)
    batch = make_batch(PROBLEMS["transformer"].spec, 4)
    losses = [each.criterion(each.forward(batch), batch) for each in (rig, plain)]
    assert torch.equal(*losses)
    assert loss_of(rig, batch, torch.tensor(1)) != losses[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("logits", ["full", CHUNKED], ids=["full", "chunked"])
@pytest.mark.parametrize("format", [TeacherFormat.fp32, pytest.param(TeacherFormat.bf16, marks=pytest.mark.slow)])
def test_planned_as_measured(model: str, logits: str | ChunkedLogits, format: TeacherFormat) -> None:
    problem = distilled(LARGER[model], LARGER[model], teacher_format=format)
    knobs = knobs_of(logits=logits)
    measured, planned = peak_as_measured(problem, knobs, 6), peak_as_planned(problem, knobs, 6)
    assert planned.peak_bytes == measured.peak_bytes
    assert planned.by_kind_max == measured.by_kind_max
    rig = assemble(problem, knobs, CPU)
    assert rig.teacher is not None
    of_teacher, of_model = (sum(each.nbytes for each in model.parameters()) for model in (rig.teacher, rig.model))
    assert measured.by_kind_max[Kind.PARAMETERS] >= of_teacher + of_model


def test_16_bits_halve_the_teacher() -> None:
    half, whole = (
        assemble(distilled("transformer", teacher_format=format), knobs_of(), CPU).teacher
        for format in (TeacherFormat.bf16, TeacherFormat.fp32)
    )
    assert half is not None
    assert whole is not None
    assert 2 * sum(p.nbytes for p in half.parameters()) == sum(p.nbytes for p in whole.parameters())


def test_tiles_of_the_last_layer_are_refused() -> None:
    with pytest.raises(Incompatible, match="compares with targets alone: this task has a teacher"):
        assemble(distilled("transformer"), knobs_of(logits="tiled"), CPU)


def test_the_plan_of_another_teacher_is_another() -> None:
    one = distilled("transformer")
    assert one.description != distilled("transformer", PROBLEMS["transformer"]).description
    assert one.description != distilled("transformer", teacher_format=TeacherFormat.bf16).description
    assert replace(one.config, alpha=0.1) != one.config
