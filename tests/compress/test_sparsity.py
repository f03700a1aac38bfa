"""sparsity: which weights have masks, how many are 0 in each step, what a resumed run does, and what masks cost."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.compress.sparsity import Magnitude, Movement, NoSparsity, RigL, Set, TwoOfFour
from lowvram.compress.sparsity.dynamic import kept_by_layer
from lowvram.compress.sparsity.masks import MaskingStepper
from lowvram.compress.sparsity.pruning import Schedule
from lowvram.compress.sparsity.two_of_four import smaller_half
from lowvram.compress.sparsity.weights import Masked
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob
from lowvram.core.states import load_whole, trained_state
from lowvram.core.step import step
from lowvram.knobs.adapter import Freeze
from lowvram.knobs.optimizer import SGD
from lowvram.loops.export.folder import load
from lowvram.models.transformer import TransformerConfig
from lowvram.tasks import Auto
from tests.calls import TINY
from tests.laboratory import (
    CPU,
    MODELS,
    PROBLEMS,
    TOKENS,
    knobs_of,
    leaves_something_behind,
    make_batch,
    peak_as_measured,
    peak_as_planned,
)
from tests.masks import (
    OFTEN,
    STEPS,
    Choices,
    gradients_of,
    masked_in,
    masks_of,
    num_masked,
    rig_of,
    steps_of,
    total,
    trained,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.sampled(2)

# Which weights have masks.


def test_the_layers_of_the_blocks_have_masks() -> None:
    names = {model: list(masked_in(rig_of(model, sparsity="magnitude"))) for model in MODELS}
    transformer, resnet = names["transformer"], names["resnet"]
    assert len(transformer) == 3 * 4
    assert all(name.startswith("blocks.") for name in transformer)
    convolutions = [name for name, module in bare("resnet").named_modules() if isinstance(module, nn.Conv2d)]
    assert set(resnet) == set(convolutions[1:])  # without the stem


def bare(problem: str) -> nn.Module:
    return PROBLEMS[problem].make_model()


def test_layers_are_named_by_pieces_of_their_names() -> None:
    knob = Magnitude(layers=["blocks.1", "head"])
    problem = Auto().pose(
        TransformerConfig(num_layers=2, width=16, num_heads=2, context=8, tied_embeddings=False), TOKENS
    )
    names = list(knob.layers_with_masks(problem.structure(problem.make_model())))
    assert "head" in names
    assert len(names) == 5
    assert all("blocks.1." in name or name == "head" for name in names)


def test_a_weight_that_two_layers_share_has_one_mask() -> None:
    model = bare("transformer")
    first, second = (model.get_submodule(f"blocks.{number}.mlp") for number in (0, 1))
    linear = [name for name, layer in first.named_modules() if isinstance(layer, nn.Linear)]
    for name in linear:
        second.get_submodule(name).weight = first.get_submodule(name).weight  # pyright: ignore[reportAttributeAccessIssue]
    names = Magnitude().layers_with_masks(PROBLEMS["transformer"].structure(model))
    assert len(names) == 3 * 4 - len(linear)
    assert not any("blocks.1.mlp" in name for name in names)


def test_frozen_weights_have_no_masks() -> None:
    rig = rig_of("transformer", adapter=Freeze(["blocks.2"]), sparsity="magnitude")
    assert all("blocks.2." in name for name in masked_in(rig))


def test_without_masks_nothing_changes() -> None:
    rig = rig_of("transformer", sparsity=NoSparsity())
    assert not isinstance(rig.stepper, MaskingStepper)


# How many weights are 0.


def test_the_share_grows_along_a_cubic_curve() -> None:
    schedule = Schedule(share=0.8, begin=10, end=50, every=10)
    assert [number for number in range(100) if schedule.is_due(number)] == [10, 20, 30, 40, 50]
    shares = [schedule.share_at(number) for number in (10, 20, 30, 50)]
    assert shares == pytest.approx([0, 0.8 * (1 - 0.75**3), 0.8 * (1 - 0.5**3), 0.8])
    assert [number for number in range(100) if replace(schedule, end=45).is_due(number)] == [10, 20, 30, 40, 45]


@pytest.mark.parametrize("problem", MODELS)
@pytest.mark.parametrize("option", ["magnitude", "movement"])
def test_a_growing_share_is_masked_to_the_unit_and_stays_so(option: str, problem: str) -> None:
    rig = rig_of(problem, sparsity=OFTEN[option])
    schedule = OFTEN[option].schedule  # pyright: ignore[reportAttributeAccessIssue]
    before = {name: masked.clone() for name, (_, masked) in masked_in(rig).items()}
    counts = []
    for _ in steps_of(rig):
        now = {name: masked.clone() for name, (_, masked) in masked_in(rig).items()}
        assert all((now[name] >= before[name]).all() for name in now)
        counts.append(num_masked(rig))
        before = now
    wanted = [round(schedule.share_at(min(number, schedule.end)) * total(rig)) for number in range(STEPS)]
    assert counts == wanted
    assert counts[-1] == round(0.7 * total(rig))


def test_magnitude_masks_the_smallest_weights_of_all_layers() -> None:
    rig = rig_of("transformer", sparsity=Magnitude(share=0.4, steps=1))
    weights = torch.cat([weight.detach().abs().flatten() for weight, _ in masked_in(rig).values()])
    trained(rig, 1)
    masked = torch.cat([masked.flatten() for _, masked in masked_in(rig).values()])
    assert int(masked.sum()) == round(0.4 * len(masked))
    assert weights[masked].max() <= weights[~masked].min()


def test_movement_masks_what_moves_to_zero() -> None:
    """After two steps of plain SGD the sum of -weight * gradient is, but for rounding, that of weight * movement."""
    knob = Movement(share=0.5, begin=1.0, end=1.0, steps=3)
    rig = rig_of("transformer", sparsity=knob, optimizer=SGD(lr=1e-3, momentum=0.0))
    sums = {name: torch.zeros_like(weight).double() for name, (weight, _) in masked_in(rig).items()}
    for number in range(2):
        before = {name: weight.detach().double().clone() for name, (weight, _) in masked_in(rig).items()}
        list(steps_of(rig, 1, number))
        for name, (weight, _) in masked_in(rig).items():
            sums[name] += before[name] * (weight.detach().double() - before[name]) / 1e-3
    list(steps_of(rig, 1, 2))
    scores = torch.cat([score.flatten() for score in sums.values()])
    masked = torch.cat([masked.flatten() for _, masked in masked_in(rig).values()])
    assert int(masked.sum()) == round(0.5 * len(masked))
    wanted = scores < scores.median()
    assert (wanted == masked).double().mean() > 0.99  # those next to the threshold differ by rounding
    assert scores[masked].max() < scores[~masked].min() + 1e-3 * scores.abs().max()


@pytest.mark.parametrize("problem", MODELS)
@pytest.mark.parametrize("option", ["set", "rigl"])
def test_a_fixed_number_of_weights_trains_from_the_start(option: str, problem: str) -> None:
    rig = rig_of(problem, sparsity=OFTEN[option])
    counts = {name: int(masked.sum()) for name, (_, masked) in masked_in(rig).items()}
    assert sum(counts.values()) == round(0.7 * total(rig))
    assert all(not weight[masked].any() for weight, masked in masked_in(rig).values())
    seen = [masks_of(rig)]
    for _ in steps_of(rig):
        assert counts == {name: int(masked.sum()) for name, (_, masked) in masked_in(rig).items()}
        seen.append(masks_of(rig))
    moved = [int((one != other).sum()) // 2 for one, other in pairwise(seen)]
    rule: Any = rig.stepper.masking.rule  # pyright: ignore[reportAttributeAccessIssue]
    assert [bool(number) for number in moved] == [rule.is_due(number) for number in range(STEPS)]


def test_the_share_that_moves_falls_along_half_a_cosine() -> None:
    rig = rig_of("transformer", sparsity=RigL(share=0.5, drop=0.4, end=0.75, every=1, steps=100))
    stepper: Any = rig.stepper
    rule = stepper.masking.rule
    mask = rule.masks[0]
    shares = [rule.num_moved(mask, number) / rule.num_kept[mask.name] for number in (0, 25, 50, 74)]
    wanted = [0.2 * (1 + math.cos(math.pi * number / 75)) for number in (0, 25, 50, 74)]
    assert shares == pytest.approx(wanted, abs=0.01)
    assert [number for number in (0, 1, 74, 75) if rule.is_due(number)] == [1, 74]


def test_smaller_layers_are_denser() -> None:
    """Erdős-Rényi: densities in proportion to (inputs + outputs) / (inputs * outputs), and full where that is above
    1."""
    shapes = [(64, 64), (256, 64), (8, 8)]
    counts = kept_by_layer(shapes, 3000)
    assert sum(counts) == 3000
    assert counts[2] == 64
    assert counts[0] / (64 + 64) == pytest.approx(counts[1] / (256 + 64), rel=0.01)
    for num in range(1, 200, 7):
        assert sum(kept_by_layer([(3, 3, 2, 2), (5, 7), (1, 1), (20, 9)], num)) == num


def test_rigl_grows_the_weights_with_the_largest_gradients() -> None:
    """Of the whole step: of all parts."""
    knob = RigL(share=0.6, drop=0.5, every=1, steps=100)
    rig, dense = (rig_of("transformer", sparsity=which, accum="x2") for which in (knob, "none"))
    trained(rig, 1)
    dense.model.load_state_dict(rig.model.state_dict())
    before = {name: (weight.detach().clone(), masked.clone()) for name, (weight, masked) in masked_in(rig).items()}
    list(steps_of(rig, 1, 1))
    gradients = gradients_of(dense, make_batch(PROBLEMS["transformer"].spec, 8, 1))
    num_grown = 0
    for name, (_, now) in masked_in(rig).items():
        weight, was = before[name]
        dropped, grown, gradient = now & ~was, was & ~now, gradients[f"{name}.weight"].abs()
        num_grown += int(grown.sum())
        stays = ~was & ~now
        assert not dropped.any() or weight[dropped].abs().max() <= weight[stays].abs().max()
        assert not grown.any() or gradient[grown].min() >= gradient[now].max() * 0.999
    assert num_grown


def test_what_is_drawn_depends_on_the_seed_and_the_step_alone() -> None:
    def masks(seed: int, batch_seed: int) -> Tensor:
        rig = assemble(PROBLEMS["transformer"], knobs_of(sparsity=Set(share=0.5, steps=STEPS)), CPU, seed)
        torch.manual_seed(batch_seed)
        return masks_of(rig)

    assert torch.equal(masks(0, 1), masks(0, 2))
    assert not torch.equal(masks(0, 1), masks(1, 1))


@pytest.mark.parametrize("problem", MODELS)
def test_two_of_each_four_are_masked(problem: str) -> None:
    rig = rig_of(problem, sparsity=OFTEN["two_of_four"])
    for number, _ in enumerate(steps_of(rig)):
        assert num_masked(rig) == (total(rig) // 2 if number >= 2 else 0)
    for weight, masked in masked_in(rig).values():
        assert torch.equal(weight == 0, masked)
        assert (masked.movedim(1, -1).unflatten(-1, (-1, 4)).sum(-1) == 2).all()


def test_the_two_largest_of_four_stay_and_of_equal_ones_the_first() -> None:
    weight = torch.tensor([[1.0, -3.0, 2.0, 0.5, 0.0, 0.0, 0.0, 0.0], [4.0, 4.0, 4.0, -4.0, -1.0, 0.0, 0.0, 2.0]])
    wanted = [
        [True, False, False, True, False, False, True, True],
        [False, False, True, True, False, True, True, False],
    ]
    assert smaller_half(weight, 1).tolist() == wanted
    assert torch.equal(smaller_half(weight.T, 0), torch.tensor(wanted).T)
    images = torch.randn(3, 8, 2, 2).to(memory_format=torch.channels_last)
    assert (smaller_half(images, 1).view(3, 2, 4, 2, 2).sum(2) == 2).all()


# A run goes on to the bit.


FP16: Choices = {"stepping": "in_backward", "precision": "fp16"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("option", "choices"), [*((option, {}) for option in OFTEN), ("rigl", FP16), ("movement", FP16)], ids=str
)
def test_a_resumed_run_goes_on_to_the_bit(option: str, choices: Choices) -> None:
    whole = rig_of("transformer", sparsity=OFTEN[option], **choices)
    half = rig_of("transformer", sparsity=OFTEN[option], **choices)
    list(steps_of(half, 3))
    file = io.BytesIO()
    torch.save({"model": trained_state(half.model), "stepper": half.stepper.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    resumed = assemble(PROBLEMS["transformer"], knobs_of(sparsity=OFTEN[option], **choices), CPU, seed=0)
    load_whole(resumed.model, saved["model"])
    resumed.stepper.load_state_dict(saved["stepper"])
    list(steps_of(whole))
    list(steps_of(resumed, STEPS - 3, 3))
    assert torch.equal(masks_of(whole), masks_of(resumed))
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))


@pytest.mark.parametrize("option", ["magnitude", "movement"])
def test_zeros_stay_where_a_resumed_run_has_more_steps(option: str) -> None:
    """Whose schedule masks fewer weights at first."""
    short = trained(rig_of("transformer", sparsity=OFTEN[option]))
    longer = rig_of("transformer", sparsity=replace(OFTEN[option], steps=3 * STEPS))
    load_whole(longer.model, trained_state(short.model))
    longer.stepper.load_state_dict(short.stepper.state_dict())
    before = masks_of(longer)
    assert int(before.sum()) == round(0.7 * total(short))
    for _ in steps_of(longer, 2, STEPS):
        assert torch.equal(masks_of(longer), before)
        assert all(not weight[masked].any() for weight, masked in masked_in(longer).values())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("choices", [{}, {"precision": "fp16", "depth": "layer_drop"}], ids=str)
@pytest.mark.parametrize("option", OFTEN)
def test_a_run_that_ends_with_other_masks_than_it_promises_says_so(option: str, choices: Choices) -> None:
    """Resumed with fewer steps, or with another share; with the same it says nothing."""
    rig, knob = rig_of("transformer", sparsity=OFTEN[option], **choices), OFTEN[option]
    assert isinstance(knob, Masked)
    list(steps_of(rig, 1))
    begun = rig.stepper.remark()
    list(steps_of(rig, STEPS - 1, 1))
    assert rig.stepper.remark() is None
    if option == "two_of_four":
        assert str(begun).startswith("0 of them are masked at the end, not 0.5: the run was resumed")
        return
    assert bool(begun) is (option in ("magnitude", "movement"))
    less = rig_of("transformer", sparsity=replace(knob, share=0.3), **choices)  # pyright: ignore[reportCallIssue]
    less.stepper.load_state_dict(rig.stepper.state_dict())
    sentence = f"{knob.final_share:.4g} of them are masked at the end, not 0.3: the run was resumed with other steps"
    assert str(less.stepper.remark()).startswith(sentence)


def test_without_masks_nothing_is_promised() -> None:
    assert rig_of("transformer").stepper.remark() is None


def masks_and_weights() -> list[list[Any]]:
    rig = assemble(PROBLEMS["transformer"], knobs_of(sparsity=OFTEN["rigl"], sharding="ddp"), CPU)
    for number in range(3):
        batch = make_batch(PROBLEMS["transformer"].spec, 8, number)
        step(rig, batch.map(lambda tensor: tensor.tensor_split(2)[torch.distributed.get_rank()]))
    return [masks_of(rig).tolist(), [weight.sum().item() for weight in rig.model.parameters()]]


@pytest.mark.slow
def test_all_ranks_have_the_same_masks_as_one() -> None:
    one, other = on_ranks(masks_and_weights)
    assert one == other
    alone = masks_of(trained(rig_of("transformer", sparsity=OFTEN["rigl"]), 3)).tolist()
    assert sum(map(bool.__ne__, alone, one[0])) < 0.01 * len(alone)  # sums in another order, near a threshold


# What it costs, and what is refused.


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("option", "problem"), [*((option, "resnet") for option in OFTEN), ("movement", "transformer")]
)
def test_memory_is_planned_to_the_byte_where_masks_change(option: str, problem: str) -> None:
    """In both steps: the plan has no values to choose by."""
    knob: Masked = replace(OFTEN[option], **({} if option == "two_of_four" else {"every": 1}))
    knobs = knobs_of(sparsity=knob)
    measured, planned = (peak(PROBLEMS[problem], knobs, 8) for peak in (peak_as_measured, peak_as_planned))
    assert planned.peak_bytes == measured.peak_bytes


def test_copies_of_masks_in_host_memory_are_planned_to_the_byte() -> None:
    def host_bytes(peak: Any, knob: Knob) -> int:
        knobs = knobs_of(sparsity=knob, stepping="cpu_offload")
        return peak(PROBLEMS["transformer"], knobs, 8).by_kind_max[Kind.HOST]

    knob = OFTEN["rigl"]
    assert host_bytes(peak_as_planned, knob) == host_bytes(peak_as_measured, knob)
    more = host_bytes(peak_as_measured, knob) - host_bytes(peak_as_measured, NoSparsity())
    assert more >= total(rig_of("transformer", sparsity=knob))


def test_a_mask_takes_a_byte_a_weight_and_saves_nothing() -> None:
    def optimizer_bytes(knob: Knob) -> int:
        return peak_as_measured(PROBLEMS["transformer"], knobs_of(sparsity=knob), 8).by_kind_max[Kind.OPTIMIZER]

    num = total(rig_of("transformer", sparsity="magnitude"))
    dense = optimizer_bytes(NoSparsity())
    assert num <= optimizer_bytes(Magnitude(steps=100)) - dense <= num + 512 * 12
    assert 5 * num <= optimizer_bytes(Movement(steps=100)) - dense <= 5 * num + 512 * 24


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"sharding": "fsdp"}, "the optimizer updates whole parameters"),
        ({"offload": "parameters"}, "the optimizer updates whole parameters"),
        ({"stepping": "zeroth_order"}, "the backward pass of a part is one call of autograd"),
        ({"adapter": "qlora"}, "the weights of the model's blocks train"),
        ({"adapter": "lisa"}, "the same parameters train in every step"),
    ],
)
def test_what_masks_can_not_go_with_says_so(choices: Choices, reason: str) -> None:
    with pytest.raises(Incompatible, match=f"sparsity=rigl needs that {reason}, and "):
        rig_of("transformer", sparsity="rigl", **choices)


def test_masks_that_no_optimizer_keeps_to_are_refused() -> None:
    """An optimizer that is named later replaces the one around which the masks act."""
    knobs = knobs_of(sparsity="magnitude")
    with pytest.raises(Incompatible, match="sparsity acts around the optimizer: name sparsity after it"):
        assemble(PROBLEMS["transformer"], dict(reversed(knobs.items())), CPU)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Magnitude(share=1.0), "sparsity.share=1.0: must be above 0 and below 1"),
        (lambda: Movement(every=0), "sparsity.every=0: must be at least 1 step"),
        (lambda: Magnitude(begin=0.5, end=0.25), "sparsity.begin=0.5: must be at most sparsity.end=0.25"),
        (lambda: Set(drop=0.0), "sparsity.drop=0.0: must be above 0"),
        (lambda: RigL(end=1.5), "sparsity.end=1.5: must be between 0"),
        (lambda: TwoOfFour(begin=-0.1), "sparsity.begin=-0.1: must be between 0"),
        (lambda: Magnitude(layers=[]), r"sparsity.layers='\[\]': must be null"),
        (lambda: Magnitude(steps=0), "sparsity.steps=0: must be null"),
        (lambda: Magnitude(share=float("nan")), "sparsity.share=nan"),
        (
            lambda: rig_of("transformer", sparsity=Magnitude()),
            "sparsity.steps=null: must be the number of updates, where no train.steps gives it: set sparsity.steps",
        ),
        (
            lambda: rig_of("transformer", sparsity=Magnitude(layers=["stem"])),
            "sparsity.layers='?stem'?: must be a name",
        ),
        (
            lambda: rig_of("resnet", sparsity=TwoOfFour(layers=["stem"])),
            "whose number of inputs divides by four: here is none",
        ),
    ],
)
def test_values_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make()


@pytest.mark.slow
def test_a_run_that_was_resumed_with_fewer_steps_says_which_share_it_has(call: Any) -> None:
    words = (*TINY, "sparsity=magnitude", "sparsity.every=1", "sparsity.begin=0")
    stopped = call(*words, "train.steps=20", "name=term@6")
    assert stopped.code == 75, stopped.said()
    run = call("resume=last", "train.steps=7", "name=null")
    assert run.code == 0, run.said()
    share = run.row["model"]["share_of_zeros"]
    assert 0 < share < 0.5
    missed = f"{share:.4g} of them are masked at the end, not 0.5: the run was resumed with other steps or shares"
    assert missed in run.row["semantics_changed"]
    assert missed in run.out


def test_a_run_exports_real_zeros_and_tells_their_share(call: Any) -> None:
    tiny = ("model.num_layers=2", "model.width=16", "model.num_heads=2", "data.sequence_length=16")
    quick = ("data=python_source", "data.eval_samples=4", "train.batch_size=4", "train.steps=4")
    run = call("sparsity=magnitude", "sparsity.share=0.75", *tiny, *quick)
    assert run.code == 0, run.said()
    assert run.row["model"]["share_of_zeros"] == 0.75
    assert "share of zeros 0.75" in run.said()
    assert "masked weights are 0" in run.row["semantics_changed"]
    model = load(run.folder / "model")
    layers = [layer for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]  # pyright: ignore[reportAttributeAccessIssue]
    zeros = sum(int((layer.weight == 0).sum()) for layer in layers)
    assert zeros == 0.75 * sum(layer.weight.numel() for layer in layers)


def test_without_undoable_steps() -> None:
    """Masks follow the number of the step, also after an update that was left out."""
    assert leaves_something_behind(sparsity="magnitude")
