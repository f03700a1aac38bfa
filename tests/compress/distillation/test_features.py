"""What holds where blocks learn from the teacher's: against a reference by hand, without weight, in parts, in plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowvram.compress.distillation.matching import Call
from lowvram.compress.distillation.narrowing import NARROWING
from lowvram.compress.distillation.task import Distilled
from lowvram.compress.distillation.teacher import TeacherFormat
from lowvram.config.errors import Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob
from lowvram.core.rig import IGNORE, Part
from lowvram.core.step import step
from lowvram.knobs.accum import Parts
from lowvram.knobs.logits import ChunkedLogits
from lowvram.knobs.sharding import PipelineParallel
from lowvram.knobs.tile import TiledBlocks
from lowvram.tasks import Auto, Problem
from tests.compress.distillation.teachers import DEEPER, FAR, TEACHERS, InDoubleWithTeacher, distilled, rig_after_steps
from tests.hugging import tiny, with_weights
from tests.laboratory import (
    CPU,
    LARGER,
    PROBLEMS,
    RESNET,
    TRANSFORMER,
    compiler_as_before,
    knobs_of,
    make_batch,
    peak_as_measured,
    peak_as_planned,
    relative_error,
    train,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.sampled(2)

MODELS = ["transformer", "resnet"]
MATCHES = {"transformer": {0: 1, 1: 3, 2: 4}, "resnet": {0: 1, 1: 2, 2: 5}}
SIZES = [6, 4, 5]
CHUNKED = ChunkedLogits(chunk_tokens=3)
LOGITS = pytest.mark.parametrize("logits", ["full", CHUNKED], ids=["full", "chunked"])


WEIGHTS = {"transformer": 300.0, "resnet": 0.3, "resnet_group": 0.3}  # so that block outputs count as much as logits


def matched(model: str, **values: Any) -> Distilled:
    """A student whose blocks learn from those of a teacher that is as wide, and deeper, with weights of its own."""
    return distilled(model, DEEPER[model], seed=5, **{"feature_weight": WEIGHTS[model], **values})


def states_of(problem: Problem, model: nn.Module, part: Part, blocks: list[nn.Module]) -> tuple[Tensor, list[Tensor]]:
    """The logits of a model, and the outputs of its blocks."""
    states: list[Tensor] = []

    def note(block: nn.Module, inputs: Any, output: Any) -> None:
        states.append(output)

    handles = [block.register_forward_hook(note) for block in blocks]
    logits = problem.call(model, part.inputs)
    for handle in handles:
        handle.remove()
    return logits.flatten(0, -2), states


def loss_by_hand(model: str, student: nn.Module, teacher: nn.Module, part: Part, weight: float) -> Tensor:
    """The mean loss over targets, as the docs have it, written plainly."""
    alpha, t = FAR
    problem, counts = PROBLEMS[model], part.targets != IGNORE
    logits, ours = states_of(problem, student, part, problem.structure(student).blocks)
    with torch.no_grad():
        wanted, theirs = states_of(DEEPER[model], teacher, part, DEEPER[model].structure(teacher).blocks)
    rows, targets = counts.flatten(), part.targets.flatten()
    loss = (1 - alpha) * F.cross_entropy(logits[rows], targets[rows])
    p, q = (torch.log_softmax(each / t, -1)[rows] for each in (logits, wanted))
    loss = loss + alpha * t**2 * F.kl_div(p, q, reduction="batchmean", log_target=True)
    each = [F.mse_loss(ours[number][counts], theirs[other][counts]) for number, other in MATCHES[model].items()]
    return loss + weight * torch.stack(each).mean()


@pytest.mark.parametrize("model", MODELS)
@LOGITS
def test_loss_and_gradients_are_those_of_a_reference_by_hand(model: str, logits: str | ChunkedLogits) -> None:
    rig = assemble(InDoubleWithTeacher(matched(model)), knobs_of(logits=logits), CPU)
    plain = assemble(InDoubleWithTeacher(matched(model, feature_weight=0.0)), knobs_of(), CPU)
    assert plain.teacher is not None
    DEEPER[model].structure(plain.teacher).head.__dict__.pop("forward")  # pyright: ignore[reportOptionalMemberAccess] # so it is asked, too
    part = make_batch(PROBLEMS[model].spec, 6, dtype=torch.float64)
    wanted = loss_by_hand(model, plain.model, plain.teacher, part, WEIGHTS[model])
    wanted.backward()
    gradients = {name: each.grad for name, each in plain.model.named_parameters() if each.grad is not None}

    found = train(InDoubleWithTeacher(matched(model)), knobs_of(logits=logits), [6])
    torch.testing.assert_close(step(rig, part)[0], wanted.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.losses[0], wanted.detach(), rtol=1e-12, atol=0)
    assert relative_error({name: each[0] for name, each in found.gradients.items()}, gradients) < 1e-12


@pytest.mark.parametrize("model", MODELS)
@LOGITS
def test_without_weight_no_bit_changes(model: str, logits: str | ChunkedLogits) -> None:
    """Nor does the memory: nothing is noted."""
    without, plain = matched(model, feature_weight=0.0), distilled(model, DEEPER[model], seed=5)
    found, wanted = (train(task, knobs_of(logits=logits), SIZES) for task in (without, plain))
    assert torch.equal(torch.stack(found.losses), torch.stack(wanted.losses))
    assert relative_error(found.parameters, wanted.parameters) == 0
    rig = assemble(without, knobs_of(logits=logits), CPU)
    assert rig.move(make_batch(without.spec, 4)).soft.features is None
    assert not any(block._forward_hooks for block in without.structure(rig.model).blocks)
    other = train(matched(model), knobs_of(logits=logits), SIZES)
    assert relative_error(other.parameters, wanted.parameters) > 1e-4


@pytest.mark.parametrize("model", ["transformer", "resnet_group"])
@LOGITS
def test_parts_are_the_whole_batch(model: str, logits: str | ChunkedLogits) -> None:
    parts, whole = (train(matched(model), knobs_of(logits=logits, accum=accum), [8, 7]) for accum in (Parts(4), "none"))
    torch.testing.assert_close(torch.stack(parts.losses), torch.stack(whole.losses), rtol=2e-6, atol=0)
    first = [{name: each[0] for name, each in trained.gradients.items()} for trained in (parts, whole)]
    assert relative_error(*first) < 2e-6


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "choice", [{"ckpt": "every1"}, {"ckpt": "sqrt"}, {"offload": "activations"}, {"stepping": "in_backward"}]
)
def test_exact_knobs_change_no_number(model: str, choice: dict[str, str]) -> None:
    """Recomputation compares no block twice."""
    found, wanted = (train(matched(model), knobs_of(**each), SIZES) for each in (choice, {}))
    torch.testing.assert_close(torch.stack(found.losses), torch.stack(wanted.losses), rtol=2e-6, atol=0)
    assert relative_error(found.parameters, wanted.parameters) < 2e-6


def test_blocks_of_few_samples_at_a_time_are_compared_whole() -> None:
    task = matched("transformer")
    found, wanted = (train(task, knobs_of(tile=tile), SIZES) for tile in (TiledBlocks(samples=2), "none"))
    assert relative_error(found.parameters, wanted.parameters) < 2e-6


@pytest.mark.sampled
@pytest.mark.parametrize("model", ["transformer", "resnet_group"])  # adapters freeze statistics of BatchNorm
@pytest.mark.parametrize(
    "choice",
    [
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"precision": "bf16_pure"},
        {"stepping": "zeroth_order"},
        {"activations": "int8"},
        {"adapter": "freeze"},
        {"depth": "layer_drop"},
        pytest.param({"adapter": "lora"}, marks=pytest.mark.slow),
        pytest.param({"depth": "stochastic"}, marks=pytest.mark.slow),
        pytest.param({"offload": "parameters"}, marks=pytest.mark.slow),
        pytest.param({"compile": "torchscript"}, marks=pytest.mark.slow),
        pytest.param({"compile": "blocks"}, marks=pytest.mark.slow),
        pytest.param({"compile": "model"}, marks=pytest.mark.slow),
    ],
    ids=lambda choice: "=".join(*choice.items()),
)
def test_other_knobs_meet_features(model: str, choice: dict[str, str]) -> None:
    """The first loss is that without the knob, up to its rounding, if the knob leaves out no block."""
    found, wanted = (losses_of(matched(model), knobs_of(**each)) for each in (choice, {}))
    assert torch.isfinite(torch.stack(found)).all()
    if "depth" not in choice:
        torch.testing.assert_close(found[0].float(), wanted[0], rtol=2e-2, atol=0)


def losses_of(task: Distilled, knobs: Mapping[str, Knob]) -> list[Tensor]:
    """Of two steps, whose images are in fp32."""
    rig, batch = assemble(task, knobs, CPU), make_batch(task.spec, 6)
    with compiler_as_before():
        return [step(rig, batch)[0] for _ in range(2)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("format", list(TeacherFormat))
def test_the_teacher_gets_no_gradient(model: str, format: TeacherFormat) -> None:
    rig = rig_after_steps(matched(model, teacher_format=format), SIZES)
    part = rig.move(make_batch(PROBLEMS[model].spec, 4))
    assert not any(states.requires_grad for states in part.soft.features.states.values())


@pytest.mark.parametrize("model", MODELS)
def test_blocks_come_nearer(model: str) -> None:
    rig = assemble(matched(model, alpha=0.0, feature_weight=10 * WEIGHTS[model]), knobs_of(), CPU)
    rig.stepper.set_lr(1e-2)
    batch = make_batch(PROBLEMS[model].spec, 8)
    distances = []
    for _ in range(30):
        part = rig.move(batch)
        rig.forward(part)
        distances.append(part.soft.features.loss().item())
        step(rig, batch)
    assert distances[-1] < 0.5 * distances[0]


def test_only_the_chosen_blocks_count() -> None:
    rig = assemble(matched("transformer", features=[1]), knobs_of(), CPU)
    part = rig.move(make_batch(PROBLEMS["transformer"].spec, 4))
    assert part.soft.features.states.keys() == {Call(1, 0)}
    rig.forward(part)
    assert not part.soft.features.states  # what was compared isn't kept


def test_of_blocks_that_share_weights_each_call_is_compared() -> None:
    shared = Auto().pose(replace(TRANSFORMER, num_layers=3, num_distinct_layers=1), PROBLEMS["transformer"].spec)
    ckpt, none = (
        train(distilled(shared, DEEPER["transformer"], 5, feature_weight=300.0), knobs_of(ckpt=ckpt), SIZES)
        for ckpt in ("every1", "none")
    )
    assert relative_error(ckpt.parameters, none.parameters) == 0
    rig = assemble(distilled(shared, DEEPER["transformer"], 5, feature_weight=300.0), knobs_of(), CPU)
    for _ in range(2):
        part = rig.move(make_batch(shared.spec, 4))
        rig.forward(part)
        assert len(part.soft.features.losses) == len({loss.item() for loss in part.soft.features.losses}) == 3


def test_an_evaluation_compares_nothing() -> None:
    rig, plain = (assemble(task, knobs_of(), CPU) for task in (matched("transformer"), PROBLEMS["transformer"]))
    batch = make_batch(PROBLEMS["transformer"].spec, 4)
    losses = [each.criterion(each.forward(batch), batch) for each in (rig, plain)]
    assert torch.equal(*losses)


def test_blocks_that_call_no_hook_are_noticed() -> None:
    rig = assemble(matched("transformer"), knobs_of(), CPU)
    for block in PROBLEMS["transformer"].structure(rig.model).blocks:
        block._forward_hooks.clear()
    with pytest.raises(RuntimeError, match="the model called no hook"):
        step(rig, make_batch(PROBLEMS["transformer"].spec, 4))


def larger(model: str, **sizes: Any) -> Problem:
    config = replace(TRANSFORMER, width=64, **sizes) if model == "transformer" else replace(RESNET, width=24, **sizes)
    return Auto().pose(config, LARGER[model].spec)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"accum": "x2"},
        {"ckpt": "every1"},
        {"precision": "bf16"},
        {"logits": "chunked"},
        pytest.param({"precision": "bf16", "ckpt": "every1", "accum": "x2"}, marks=pytest.mark.slow),
    ],
    ids=lambda choice: " ".join(choice) or "plain",
)
def test_planned_as_measured(model: str, choice: dict[str, str]) -> None:
    deeper = larger(model, **({"num_layers": 5} if model == "transformer" else {"layers": [3, 3]}))
    problem, knobs = distilled(LARGER[model], deeper, feature_weight=0.3), knobs_of(**choice)
    measured, planned = peak_as_measured(problem, knobs, 6), peak_as_planned(problem, knobs, 6)
    assert planned.peak_bytes == measured.peak_bytes
    assert planned.by_kind_max == measured.by_kind_max
    without = peak_as_measured(distilled(LARGER[model], deeper), knobs, 6)
    assert measured.by_kind_max[Kind.ACTIVATIONS] > without.by_kind_max[Kind.ACTIVATIONS]


def test_a_model_of_transformers_is_taught_block_by_block() -> None:
    from lowvram.compress.distillation.task import Distill
    from lowvram.data.spec import DataSpec, Modality
    from lowvram.models.hf import HfConfig, Weights

    spec = DataSpec(Modality.TOKENS, 300, (8,))
    student = HfConfig(name=tiny("gpt2"), weights=Weights.random)
    problem = Distill(teacher=with_weights("gpt2"), feature_weight=1.0).pose(student, spec)
    assert all(call == partner.call for call, partner in problem.matches.items())  # pyright: ignore[reportAttributeAccessIssue]
    rig = assemble(problem, knobs_of(), CPU, seed=7)
    assert torch.isfinite(step(rig, make_batch(spec, 4))[0])


@pytest.mark.parametrize("model", MODELS)
def test_outputs_of_another_width_are_compared_along_fixed_directions(model: str) -> None:
    """Written plainly: each output of the teacher times a matrix whose rows are orthonormal."""
    tasks = [distilled(model, seed=5, feature_weight=weight) for weight in (WEIGHTS[model], 0.0)]
    rig, plain = (assemble(InDoubleWithTeacher(task), knobs_of(), CPU) for task in tasks)
    assert plain.teacher is not None
    wider, part = TEACHERS[model], make_batch(PROBLEMS[model].spec, 6, dtype=torch.float64)
    loss = step(rig, part)[0] - step(plain, part)[0]
    again, other = (assemble(InDoubleWithTeacher(task), knobs_of(), CPU) for task in tasks)
    assert again.teacher is not None
    with torch.no_grad():
        _, ours = states_of(PROBLEMS[model], other.model, part, PROBLEMS[model].structure(other.model).blocks)
        _, theirs = states_of(wider, plain.teacher, part, wider.structure(plain.teacher).blocks)
    directions = dict(again.teacher.get_submodule(NARROWING).named_buffers())
    each = []
    for mine, his in zip(ours, theirs, strict=True):
        place = 1 if his.dim() == 4 else -1
        matrix = directions[f"from_{his.shape[place]}_to_{mine.shape[place]}"]
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(len(matrix)).double(), rtol=0, atol=1e-6)
        narrowed = (his.movedim(place, -1) @ matrix.T).movedim(-1, place)
        each.append(F.mse_loss(mine[part.targets != IGNORE], narrowed[part.targets != IGNORE]))
    torch.testing.assert_close(loss, WEIGHTS[model] * torch.stack(each).mean(), rtol=1e-10, atol=0)


def test_blocks_on_other_ranks_than_the_loss_are_not_compared() -> None:
    """The loss would leave out, without a word, what it can't see of the blocks."""
    message = "the loss reads the model's outputs alone: this task compares the outputs of blocks, too"
    with pytest.raises(Incompatible, match=message):
        assemble(matched("transformer"), knobs_of(sharding="pipeline"), CPU)


def losses_in_double(choices: dict[str, str | Knob]) -> list[float]:
    """With a teacher that no process has trained, whose predictions alone count."""
    task, knobs = distilled("transformer", DEEPER["transformer"]), knobs_of(optimizer="sgd", **choices)
    return [float(loss) for loss in train(InDoubleWithTeacher(task), knobs, [6, 6]).losses]


@pytest.mark.slow  # the quick one is tests/knobs/test_sharding_pipeline.py, of a loss of targets alone
def test_predictions_are_learnt_where_the_loss_is() -> None:
    wanted = losses_in_double({"accum": Parts(2)})
    for found in on_ranks(losses_in_double, {"accum": Parts(2), "sharding": PipelineParallel()}):
        assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("model", MODELS)
def test_directions_are_the_same_in_every_run(model: str) -> None:
    """Of a narrower teacher too, whose outputs keep their mean square."""
    for wider in (TEACHERS[model], narrower(model)):
        found = [assemble(distilled(model, wider, feature_weight=1.0), knobs_of(), CPU, seed) for seed in (0, 1)]
        one, other = ([*rig.teacher.get_submodule(NARROWING).buffers()] for rig in found if rig.teacher)
        assert one
        assert all(map(torch.equal, one, other))
        for matrix in one:
            states = torch.randn(1000, matrix.shape[1])
            ratio = (states @ matrix.T).square().mean() / states.square().mean()
            assert 0.9 < ratio.item() < 1.1


def narrower(model: str) -> Problem:
    if model == "transformer":
        return Auto().pose(replace(TRANSFORMER, width=8), PROBLEMS[model].spec)
    return Auto().pose(replace(RESNET, width=4), PROBLEMS[model].spec)


@pytest.mark.parametrize("model", MODELS)
def test_another_width_is_planned_as_measured(model: str) -> None:
    task, knobs = distilled(LARGER[model], larger_and_wider(model), feature_weight=0.3), knobs_of()
    measured, planned = peak_as_measured(task, knobs, 6), peak_as_planned(task, knobs, 6)
    assert planned.peak_bytes == measured.peak_bytes
    assert planned.by_kind_max == measured.by_kind_max


def larger_and_wider(model: str) -> Problem:
    config = replace(TRANSFORMER, width=96) if model == "transformer" else replace(RESNET, width=32)
    return Auto().pose(config, LARGER[model].spec)
