"""Models that are cut into stages, against one process at the same logical batch."""

from __future__ import annotations

import gc
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any, cast, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob
from lowvram.core.mesh import all_ranks
from lowvram.core.peak import Peak
from lowvram.core.rig import Part
from lowvram.core.row_shape import RowShape
from lowvram.core.stages import PipelineStage, ending_kind, staged_kind
from lowvram.core.states import load_whole
from lowvram.core.step import step
from lowvram.core.stepper import StepperAround
from lowvram.core.structure import Structure
from lowvram.knobs.accum import Parts
from lowvram.knobs.sharding import PipelineParallel
from lowvram.knobs.sharding.boundaries import Boundaries
from lowvram.knobs.sharding.find_segments import FindSegments, Segments, names_of
from lowvram.knobs.sharding.held_back import holding_kind
from lowvram.knobs.sharding.own_tokens import cutting_kind, gathering_kind
from lowvram.knobs.sharding.split_layers import summed_kind
from lowvram.knobs.stepping import AfterBackward
from lowvram.models.hf import HfConfig
from lowvram.planning.target import Target
from lowvram.planning.trace.tracer import trace
from lowvram.tasks import Auto
from tests.hugging import tiny
from tests.knobs.test_sharding import THREE, errors, train_each
from tests.laboratory import (
    CPU,
    IMAGES,
    RESNET,
    TOKENS,
    TRANSFORMER,
    InDouble,
    Trained,
    knobs_of,
    make_batch,
    my_slice,
    peak_as_measured,
)
from tests.models.test_hf_families import spec_for
from tests.ranks import on_ranks
from tests.restless import WIDTH, Mlp
from tests.tiers import first_of

pytestmark = pytest.mark.medium

Choices = dict[str, str | Knob]
DEEP = Auto().pose(replace(TRANSFORMER, num_layers=4), TOKENS)
GROUPED = Auto().pose(replace(TRANSFORMER, num_heads=4, num_kv_heads=2), TOKENS)
MANY: list[Choices] = [
    {"optimizer": "sgd", "accum": Parts(4), "stepping": AfterBackward(clip=0.5)},
    {"optimizer": "adamw", "accum": Parts(4), "ckpt": "every2"},
    {"optimizer": "sgd", "accum": Parts(6), "logits": "chunked"},
]
PIPELINES: dict[str, tuple[Any, int, Knob]] = {
    "two stages": (DEEP, 2, PipelineParallel()),
    "two stages, gpipe": (DEEP, 2, PipelineParallel(schedule="gpipe")),
    "three stages": (DEEP, 3, PipelineParallel()),
    "two stages each": (DEEP, 2, PipelineParallel(schedule="interleaved", stages=2)),
    "two stages that hold back": (DEEP, 2, PipelineParallel(schedule="zero_bubble")),
    "two stages each that hold back": (DEEP, 2, PipelineParallel(schedule="zero_bubble", stages=2)),
    "two rows": (DEEP, 4, PipelineParallel(pipeline=2)),
    "two rows that hold back": (DEEP, 4, PipelineParallel(pipeline=2, schedule="zero_bubble")),
    "two rows that hold back and share out states": (
        DEEP,
        4,
        PipelineParallel(pipeline=2, schedule="zero_bubble", copies="zero1"),
    ),
    "two rows that share out states": (DEEP, 4, PipelineParallel(pipeline=2, copies="zero1")),
    "two rows of two stages each": (
        DEEP,
        4,
        PipelineParallel(pipeline=2, schedule="interleaved", stages=2, copies="zero1", reduce_every_part=True),
    ),
    "two rows that are sharded": (DEEP, 4, PipelineParallel(pipeline=2, copies="fsdp")),
    "two stages whose layers are split": (GROUPED, 4, PipelineParallel(pipeline=2, tensor=2)),
    "two rows of them": (GROUPED, 8, PipelineParallel(pipeline=2, tensor=2)),
    "two rows of them that share out states": (GROUPED, 8, PipelineParallel(pipeline=2, tensor=2, copies="zero1")),
    "two rows of them that are sharded": (
        GROUPED,
        8,
        PipelineParallel(pipeline=2, tensor=2, copies="fsdp", reduce_every_part=True),
    ),
}


def together(found: list[Trained], shape: RowShape) -> Trained:
    """What the ranks of the first row have found, as one process has it."""
    step = len(found) // shape.pipeline
    row = [found[stage * step] for stage in range(shape.pipeline)]
    merged = {
        name: {key: value for each in reversed(row) for key, value in getattr(each, name).items()}
        for name in ("gradients", "parameters", "buffers")
    }
    return replace(row[0], **merged)


@pytest.mark.parametrize("name", first_of([*PIPELINES]))
def test_ranks_in_a_pipeline_train_like_one_process(name: str) -> None:
    problem, num_ranks, knob = PIPELINES[name]
    task = InDouble(problem)
    wanted = train_each(task, MANY, THREE)
    found = on_ranks(train_each, task, [{**each, "sharding": knob} for each in MANY], THREE, num_ranks=num_ranks)
    for each, one in zip(wanted, zip(*found, strict=True), strict=True):
        error = errors(together([*one], knob.row_shape(num_ranks)), each)
        assert max(error["losses"], error["gradients"]) < 1e-12
        assert error["parameters"] < 1e-10
        for rank in one:
            norms = [torch.stack([update.grad_norm for update in run.updates]) for run in (rank, each)]
            assert torch.allclose(*norms, rtol=1e-12)


KINDS = ["resnet", "gpt2", "llama", "gemma", "bert", "vit"]


@pytest.mark.parametrize("kind", first_of(KINDS))
def test_other_models_do_too(kind: str) -> None:
    """Norms over samples, positions and masks that each rank computes, tied and untied heads, classes of transformers.
    On the last rank tied embeddings are there once more."""
    config = HfConfig(tiny(kind)) if kind != "resnet" else RESNET
    task = InDouble(Auto().pose(config, spec_for(config) if isinstance(config, HfConfig) else IMAGES))
    held_back = PipelineParallel(schedule="zero_bubble")
    choices: list[Choices] = [
        {"optimizer": "sgd", "accum": Parts(2), "stepping": AfterBackward(clip=0.5), "sharding": PipelineParallel()},
        {"optimizer": "adamw", "accum": Parts(3), "ckpt": "every1", "sharding": PipelineParallel()},
        {"optimizer": "sgd", "accum": Parts(2), "sharding": held_back},
        {"optimizer": "adamw", "accum": Parts(2), "ckpt": "every1", "sharding": held_back},
    ]
    wanted = train_each(task, [{**each, "sharding": "none"} for each in choices], [12, 12])
    found = on_ranks(train_each, task, choices, [12, 12])
    for each, one in zip(wanted, zip(*found, strict=True), strict=True):
        error = errors(together([*one], RowShape(pipeline=2)), each)
        assert max(error["losses"], error["gradients"], error["buffers"]) < 1e-12
        assert error["parameters"] < 1e-10


def tied_weight(choices: Choices) -> Tensor:
    """After a step before which it has come apart, as this rank has it."""
    rig = assemble(DEEP, knobs_of(**choices), CPU)
    weight = rig.model.get_parameter("token_embedding.weight")
    with torch.no_grad():
        weight += all_ranks().rank
    step(rig, make_batch(DEEP.spec, 8))
    return weight.detach()


def test_tied_weights_stay_equal_wherever_updates_round() -> None:
    choices: Choices = {"precision": "bf16_pure", "accum": Parts(2), "sharding": PipelineParallel()}
    first, last = on_ranks(tied_weight, choices)
    assert torch.equal(first, last)


def said_in_a_step(choices: Choices) -> str:
    rig, batch = assemble(DEEP, knobs_of(**choices), CPU), my_slice(make_batch(DEEP.spec, 16))
    with redirect_stdout(StringIO()) as said:
        step(rig, batch)
    return said.getvalue()


def test_no_stage_of_a_rank_takes_those_of_the_other_for_weights_that_nothing_has_used() -> None:
    knob = PipelineParallel(pipeline=2, schedule="interleaved", stages=2, copies="zero1", reduce_every_part=True)
    assert on_ranks(said_in_a_step, {"accum": Parts(4), "sharding": knob}, num_ranks=4) == [""] * 4


def test_hints_of_a_models_new_classes_can_be_read() -> None:
    """As transformers does with each subclass of its models, in the module that the class names."""
    for kind_of in (staged_kind, ending_kind, gathering_kind, cutting_kind, summed_kind, holding_kind):
        assert kind_of(nn.Linear).__module__ == nn.Linear.__module__
        assert get_type_hints(kind_of(nn.Linear))["in_features"] is int


# What other knobs can't rely on


class Counting(StepperAround):
    """A stepper that counts the backward passes."""

    num_passes = 0

    def backward(self, loss: Tensor) -> None:
        self.num_passes += 1
        super().backward(loss)


def passes_and_weights(choices: Choices) -> tuple[int, int]:
    """How many backward passes this rank makes in a step, and how many weights it updates."""
    rig = assemble(DEEP, knobs_of(**choices), CPU)
    counting = Counting(rig.stepper)
    step(replace(rig, stepper=counting), make_batch(DEEP.spec, 8))
    return counting.num_passes, sum(each.numel() for each in rig.updated)


INTERLEAVED: Choices = {"accum": Parts(4), "sharding": PipelineParallel(schedule="interleaved", stages=2)}


def test_without_plain_backward() -> None:
    """With two stages on a rank each part goes backward in two passes there."""
    assert [num for num, _ in on_ranks(passes_and_weights, INTERLEAVED)] == [8, 8]


def test_without_every_parameter() -> None:
    whole = sum(each.numel() for each in DEEP.make_model().parameters())
    assert all(num < 0.7 * whole for _, num in on_ranks(passes_and_weights, INTERLEAVED))


# Numbers that don't fit


def test_numbers_of_ranks_that_do_not_divide_are_refused() -> None:
    assert PipelineParallel(pipeline=2, tensor=2).row_shape(8) == RowShape(pipeline=2, tensor=2)
    assert PipelineParallel(tensor=2).row_shape(8) == RowShape(pipeline=4, tensor=2)
    for knob in (PipelineParallel(pipeline=3), PipelineParallel(pipeline=2, tensor=4), PipelineParallel(tensor=3)):
        with pytest.raises(BadInput, match="a number that divides the"):
            knob.row_shape(4)
    for fields in ({"schedule": "dual"}, {"stages": 2}, {"schedule": "interleaved"}, {"pipeline": 0}, {"tensor": None}):
        with pytest.raises(BadInput, match=r"sharding\."):
            PipelineParallel(**cast("Any", fields))


class Chain(nn.Module):
    """Blocks one after another; `how` says what is wrong with them."""

    blocks: Any

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        start = y = self.first(x)
        if self.how == "number":
            y = y * start.sum().item()
        for block in self.blocks:
            y = block(y)
            y = y + 1 if self.how == "between" else y
        y = self.blocks[0](y) if self.how == "again" else y
        y = y + start if self.how == "skip" else y
        y = F.linear(y, self.blocks[1].a.weight) if self.how == "weight" else y
        return self.last(y)


WRONG = {
    "between": "the model computes between blocks.0 and the block after it",
    "number": "what stands before the blocks reads a number from what depends on weights",
    "again": "blocks.0 isn't called once",
    "skip": "what stands after the blocks reads what what stands before the blocks has made",
}


def segments_of(model: nn.Module) -> Segments:
    def call(model: nn.Module, inputs: Any) -> Any:
        return model(inputs)

    def example(num_samples: int) -> Tensor:
        return torch.ones(num_samples, WIDTH)

    return Structure(model, call, example, example).get(FindSegments(names_of(model)))


@pytest.mark.parametrize("how", WRONG)
def test_what_else_would_cross_a_boundary_is_refused(how: str) -> None:
    with pytest.raises(Incompatible, match="can't cut this model into stages: ") as refused:
        segments_of(Chain(how))
    assert WRONG[how] in str(refused.value)


def test_a_strangers_blocks_are_found_with_what_they_read() -> None:
    found = segments_of(Chain("well"))
    assert found.blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert {number for each in found.readers.values() for number in each} == {0, 1, 2, 3, found.tail}
    assert all(len(each) == 1 for each in found.readers.values())
    assert segments_of(Chain("weight")).readers["blocks.1.a.weight"] == {2, found.tail}


def test_a_stage_that_makes_another_form_of_the_same_part_is_refused() -> None:
    """The next stage has made room for what it was told the first time."""
    boundaries, stage = Boundaries(all_ranks(), None), PipelineStage(0, 0, 1, is_last=False)
    part = Part(torch.zeros(4, 3), torch.zeros(4))
    for _ in range(2):
        boundaries.told(stage, part, torch.zeros(4, 6))
    boundaries.told(stage, Part(torch.zeros(4, 2), torch.zeros(4)), torch.zeros(4, 5))  # another part
    for other in (torch.zeros(4, 7), torch.zeros(8, 6), torch.zeros(4, 6, dtype=torch.bfloat16)):
        with pytest.raises(Incompatible, match=r"has made \(.*\) of torch.* after \(1 x samples, 6\) of torch.float32"):
            boundaries.told(stage, part, other)


# What it takes


def codes_here(choices: Choices) -> dict[str, int]:
    """The bytes of each block's weights in 4 bits."""
    rig = assemble(DEEP, knobs_of(**choices), CPU)
    return {name: buffer.nbytes for name, buffer in rig.model.named_buffers() if name.endswith(".codes")}


def test_weights_in_four_bits_are_with_their_stage() -> None:
    choices: Choices = {"adapter": "qlora", "accum": Parts(2), "sharding": PipelineParallel()}
    whole = codes_here({"adapter": "qlora"})
    first, last = on_ranks(codes_here, choices)
    assert first
    assert not first.keys() & last.keys()
    assert first | last == whole


def state_and_back(choices: Choices) -> list[str]:
    """The names in a model's state, which it takes back."""
    rig = assemble(Auto().pose(RESNET, IMAGES), knobs_of(**choices), CPU)
    state = rig.model.state_dict()
    load_whole(rig.model, dict(state))  # as from a file, which doesn't have torch's versions of modules
    return [*state]


def test_a_stages_state_is_taken_back() -> None:
    """With buffers of BatchNorm, of which each stage has its own."""
    choices: Choices = {"accum": Parts(2), "sharding": PipelineParallel(schedule="gpipe")}
    first, last = on_ranks(state_and_back, choices)
    assert any("running_mean" in name for name in first)
    assert not {*first} & {*last}
    assert {*first, *last} == {*state_and_back({})}


def measured_peaks(choices: Choices, num_samples: int = 32) -> Peak:
    gc.disable()
    return peak_as_measured(DEEP, knobs_of(**choices), num_samples)


@pytest.mark.parametrize("name", first_of(["1f1b", "zero_bubble", "gpipe", "interleaved"], 2))
def test_each_stage_takes_its_share_and_what_is_planned(name: str) -> None:
    knob = PipelineParallel(schedule=name, stages=2 if name == "interleaved" else 1)
    choices: Choices = {"optimizer": "adamw", "accum": Parts(4), "sharding": knob}
    target = Target(None, 2, RowShape(pipeline=2))
    of_blocks = sum(each.numel() for each in DEEP.make_model().get_submodule("blocks").parameters())
    outside = sum(each.numel() for each in DEEP.make_model().parameters()) - of_blocks
    for stage, real in zip(target.stages(), on_ranks(measured_peaks, choices), strict=True):
        paper = trace(DEEP, knobs_of(**choices), 32, stage).sums(is_steady=True)
        assert paper.peak_bytes == pytest.approx(real.peak_bytes, rel=0.002)
        for kind in (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER, Kind.ACTIVATIONS):
            assert paper.by_kind_max[kind] == pytest.approx(real.by_kind_max[kind], rel=0.001, abs=1024), kind
        assert real.by_kind_max[Kind.PARAMETERS] <= 4 * (0.51 * of_blocks + outside) + 64 * 512
