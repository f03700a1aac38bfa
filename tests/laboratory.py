"""Tiny models, knobs by name, and training whose gradients can be inspected, for tests."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from lowvram.compat.torch_trees import tree_leaves
from lowvram.compress.sparsity import Magnitude, Movement, RigL, Set, TwoOfFour
from lowvram.config.registry import all_options, knob_of, neutral_options, ready_options
from lowvram.core.assemble import assemble, bare_model
from lowvram.core.copies import original
from lowvram.core.device import absent_facts
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.knob import Knob, Stage, model_facts
from lowvram.core.ledger import Peak, ledger
from lowvram.core.mesh import data_ranks
from lowvram.core.probes.draws import NO_RANDOMNESS
from lowvram.core.rig import IGNORE, Part, Rig, Task
from lowvram.core.shards import whole
from lowvram.core.stages import stages_of
from lowvram.core.step import step
from lowvram.core.stepper import Update
from lowvram.core.structure import Structure, lacking
from lowvram.core.values import Fill
from lowvram.data.documents import Documents
from lowvram.data.packed import Packed
from lowvram.data.source import Data
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.tile import TiledBlocks, TiledMLP, TiledTokens
from lowvram.knobs.weights.stream import SLOTS
from lowvram.models.resnet import NormKind, ResNetConfig
from lowvram.models.transformer import TransformerConfig
from lowvram.planning.target import Target
from lowvram.planning.trace.events import Sums
from lowvram.planning.trace.tracer import trace
from lowvram.tasks import Auto, Problem

torch.set_num_threads(1)  # on busy cores a second thread makes tiny steps take a hundred times as long
CPU = torch.device("cpu")
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
IS_EMULATED = "EMULATED_VALUES" in os.environ  # scripts/emulated_gpu
# What options need that have kernels of Triton's, which compute nothing on an emulated card.
OF_TRITON = {Fact.COMPILED, Fact.C_COMPILER, Fact.KERNEL_COMPILER}
needs_real_gpu = pytest.mark.skipif(IS_EMULATED, reason="needs a real card's numbers")  # in addition to needs_gpu
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=needs_gpu)]
# For tests of what compiled kernels compute: on an emulated card they write nothing.
COMPILING_DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=[*needs_gpu, needs_real_gpu])]


NEUTRAL = dict(neutral_options())
OPTIONS = {group: ready_options(group) for group in NEUTRAL}
# So that tiny batches have several tiles, but not very many, and weights are masked in the first step. Masks need to
# know how many steps there are.
SMALL: dict[tuple[str, str], Knob] = {
    ("tile", "mlp"): TiledMLP(tokens=50),
    ("tile", "blocks"): TiledBlocks(samples=6),
    ("tile", "tokens"): TiledTokens(tokens=3),
    ("sparsity", "magnitude"): Magnitude(steps=1),
    ("sparsity", "movement"): Movement(steps=1),
    ("sparsity", "set"): Set(steps=100),
    ("sparsity", "rigl"): RigL(steps=100),
    ("sparsity", "two_of_four"): TwoOfFour(steps=1),
}
KNOBS: dict[tuple[str, str], Knob] = {option: SMALL.get(option) or knob_of(option) for option in all_options()}
FACT_NAMES: dict[object, str] = {  # of the facts about a model, as the modules name them that define them
    value: name
    for module in list(sys.modules.values())
    if module.__name__.startswith("lowvram.")
    for name, value in vars(module).items()
    if isinstance(value, ModelFact)
}


def named(*pairs: tuple[str, str]) -> dict[str, Knob]:
    """Options of knob groups, by the names that messages use."""
    return {f"{group}={option}": KNOBS[group, option] for group, option in pairs}


def company(**choices: str | Knob) -> dict[str, str]:
    """Options that replace those neutral ones that conflict with the choices, such as compile=none with ckpt=compiler:
    of each such group the first option that doesn't conflict, if there is one."""
    knobs = (choice if isinstance(choice, Knob) else KNOBS[group, choice] for group, choice in choices.items())
    needs = frozenset[Fact]().union(*(knob.needs() for knob in knobs))
    return {
        group: next((option for option in OPTIONS[group] if needs.isdisjoint(KNOBS[group, option].breaks())), neutral)
        for group, neutral in NEUTRAL.items()
        if group not in choices and not needs.isdisjoint(KNOBS[group, neutral].breaks())
    }


def knobs_of(**choices: str | Knob) -> dict[str, Knob]:
    """One knob of each group: the choices (names of options, or knobs), else the neutral option or, if that conflicts
    with a choice, the one of `company`."""
    chosen = {**NEUTRAL, **company(**choices), **choices}
    return {
        f"{group}={choice}": choice if isinstance(choice, Knob) else KNOBS[group, choice]
        for group, choice in chosen.items()
    }


def missing_here(pair: tuple[str, str], device: torch.device = CPU) -> bool:
    """Whether an option needs something that this machine lacks."""
    return not KNOBS[pair].needs().isdisjoint(absent_facts(device))


TOKENS = DataSpec(Modality.TOKENS, 11, (8,))
IMAGES = DataSpec(Modality.IMAGES, 5, (3, 8, 8))
TRANSFORMER = TransformerConfig(num_layers=3, width=16, num_heads=2, context=8)
RESNET = ResNetConfig(layers=[2, 1], width=8, image_size=8)
PROBLEMS: dict[str, Problem] = {
    "transformer": Auto().pose(TRANSFORMER, TOKENS),
    "transformer_dropout": Auto().pose(replace(TRANSFORMER, dropout=0.1), TOKENS),
    "resnet": Auto().pose(RESNET, IMAGES),
    "resnet_group": Auto().pose(replace(RESNET, norm=NormKind.group), IMAGES),
    "resnet_frozen": Auto().pose(replace(RESNET, norm=NormKind.frozen, channels_last=True), IMAGES),
}
# One of each model, in which law 4 sees each kind of memory go down. Enough classes: activations are at their largest
# with the logits, or chunked ones have nothing to save. Wide enough: states of few bits take tensors of 4096 numbers.
LARGER: dict[str, Problem] = {
    "resnet": Auto().pose(replace(RESNET, width=24), replace(IMAGES, num_classes=509)),
    "transformer": Auto().pose(replace(TRANSFORMER, width=64), replace(TOKENS, num_classes=509)),
}
FIVE_BLOCKS: dict[str, Problem] = {
    "transformer": Auto().pose(TransformerConfig(num_layers=5, width=8, num_heads=1, context=8), TOKENS),
    "resnet": Auto().pose(ResNetConfig(layers=[5], width=8, image_size=8), IMAGES),
}
MODELS = list(LARGER)
WITH_DROPOUT = [f"{model}_dropout" if f"{model}_dropout" in PROBLEMS else model for model in MODELS]  # if there is such


def is_for(knob: Knob, problem: str) -> bool:
    """Whether a model has what a knob needs: a ResNet, for example, has no MLPs."""
    return not lacking_of(PROBLEMS[problem], knob)


def lacking_of(task: Task, *knobs: Knob) -> dict[ModelFact, str]:
    """The facts that knobs need and the task's model lacks."""
    return lacking(structure_of(task), model_facts(knobs))


@cache
def structure_of(task: Task) -> Structure:
    """Kept, as the laws ask for each option of each of some hundred rows."""
    return task.structure(bare_model(task))


def fitting(problem: str, knobs: Mapping[str, Knob]) -> str:
    """The name of a problem; that of the one without dropout if a knob needs a model without randomness."""
    is_fixed = any(NO_RANDOMNESS in knob.needs() for knob in knobs.values())
    return problem.removesuffix("_dropout") if is_fixed else problem


def make_batch(spec: DataSpec, num_samples: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Part:
    """Random samples. Sequences have random lengths, and every fifth image has no class, so that parts differ in their
    numbers of targets."""
    draw = torch.Generator().manual_seed(seed)
    shape = (num_samples, *spec.shape)
    if spec.modality is Modality.TOKENS and spec.layout is not None:
        texts = documents([1 + length for length in lengths_like(num_samples, spec.shape[0], draw)], spec, seed)
        return Packed().collate(texts, [(index, 0) for index in range(len(texts))])
    if spec.modality is Modality.TOKENS:
        tokens, targets = (torch.randint(spec.num_classes, shape, generator=draw) for _ in range(2))
        ends = torch.randint(1, spec.shape[0] + 1, (num_samples, 1), generator=draw)
        return Part(tokens, targets.where(torch.arange(spec.shape[0]) < ends, IGNORE))
    if spec.modality is Modality.LABELLED_TOKENS:
        return labelled_batch(spec, num_samples, draw)
    if spec.modality is Modality.MASKED_TOKENS:
        return masked_batch(spec, num_samples, draw)
    if spec.modality is Modality.PAIRS:
        return batch_of_pairs(spec, num_samples, draw)
    labels = torch.randint(spec.num_classes, (num_samples,), generator=draw)
    labels[4::5] = IGNORE
    return Part(torch.randn(shape, generator=draw).to(dtype), labels)


def lengths_like(num_samples: int, padded_length: int, draw: torch.Generator) -> list[int]:
    """Random lengths of `num_samples` sequences, most of them short."""
    return [1 + int(padded_length * share**2) for share in torch.rand(num_samples, generator=draw).tolist()]


def documents(lengths: list[int], spec: DataSpec, seed: int = 0) -> Documents:
    """Random texts with these numbers of tokens, one more than their samples have."""
    draw = np.random.default_rng(seed)
    texts = [draw.integers(spec.num_classes, size=length) for length in lengths]
    return Documents(lambda text: [texts[text]], np.array(lengths), spec.shape[0], pad_id=0)


def as_packed(texts: Documents, spec: DataSpec) -> DataSpec:
    """The spec that loader=packed makes of `spec`."""
    return Packed().fit(Data(spec, texts, texts, ""), TRANSFORMER).spec


END = 1  # the token that ends each text


def labelled_batch(spec: DataSpec, num_samples: int, draw: torch.Generator) -> Part:
    """Texts of random lengths, at least two tokens, padded with zeros."""
    shape = (num_samples, *spec.shape)
    tokens = torch.randint(2, spec.num_tokens, shape, generator=draw)
    lengths = torch.randint(2, spec.shape[0] + 1, (num_samples, 1), generator=draw)
    places = torch.arange(spec.shape[0])
    tokens = tokens.where(places != lengths - 1, END).where(places < lengths, 0)
    labels = torch.randint(spec.num_classes, (num_samples,), generator=draw)
    return Part({"input_ids": tokens, "attention_mask": (places < lengths).long()}, labels)


def masked_batch(spec: DataSpec, num_samples: int, draw: torch.Generator) -> Part:
    """Texts of random lengths, about a third of whose tokens are targets."""
    inputs = labelled_batch(replace(spec, num_classes=2, vocab_size=spec.num_tokens), num_samples, draw).inputs
    is_target = (torch.rand(inputs["input_ids"].shape, generator=draw) < 0.3) & (inputs["attention_mask"] == 1)
    is_target[0, 0] = True
    return Part(inputs, inputs["input_ids"].where(is_target, IGNORE))


def batch_of_pairs(spec: DataSpec, num_samples: int, draw: torch.Generator) -> Part:
    """Pairs of texts of random lengths."""
    assert spec.layout is not None
    texts = replace(spec, num_classes=2, vocab_size=spec.num_tokens, layout=None)
    source = labelled_batch(texts, num_samples, draw).inputs
    target = labelled_batch(replace(texts, shape=spec.layout.targets.shape), num_samples, draw).inputs
    decoder_ids = target["input_ids"].roll(1, 1)
    decoder_ids[:, 0] = 0
    return Part(
        {**source, "decoder_input_ids": decoder_ids}, target["input_ids"].where(target["attention_mask"] == 1, IGNORE)
    )


def my_slice(batch: Part) -> Part:
    """This rank's slice of a logical batch, as loaders give it."""
    ranks, num_samples = data_ranks(), batch.num_samples
    num_in_batch = num_samples if num_samples % ranks.size else None
    return replace(batch.map(lambda tensor: tensor.tensor_split(ranks.size)[ranks.rank]), num_in_batch=num_in_batch)


def batches(spec: DataSpec, sizes: list[int], dtype: torch.dtype = torch.float32) -> Iterator[Part]:
    """A batch of each of these sizes."""
    return (make_batch(spec, size, seed, dtype) for seed, size in enumerate(sizes))


@contextmanager
def compiler_as_before() -> Iterator[None]:
    """Inside it torch's compiler has torch's default settings, which knobs may change; afterwards the settings are
    restored, and compiled graphs are dropped."""
    with (
        dynamo_config.patch({name: getattr(dynamo_config, name) for name in ("recompile_limit", LIMIT_IS_AN_ERROR)}),
        inductor_config.patch(fallback_random=False),
        functorch_config.patch(activation_memory_budget=1.0),
    ):
        yield
    torch.compiler.reset()


LIMIT_IS_AN_ERROR = "fail_on_recompile_limit_hit"


def saved_bytes(task: Task, knobs: Mapping[str, Knob], batch: Part) -> int:
    """The bytes of the tensors that a forward pass saves for the backward pass, without weights, each storage counted
    once. Unlike the ledger it works with compiled models."""
    with compiler_as_before():
        return _saved_bytes(assemble(task, knobs, CPU), batch)


def _saved_bytes(rig: Rig, batch: Part) -> int:
    weights = {parameter.untyped_storage().data_ptr() for parameter in rig.model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    rig.stepper.begin(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = rig.forward(batch)
    del outputs
    return sum(kept.values())


class InDouble(Task):
    """The same problem in fp64, from the fp32 model's initial values."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.spec = problem, problem.spec

    def make_model(self) -> nn.Module:
        return self.problem.make_model().double()

    def criterion(self, outputs: Any, part: Part) -> Tensor:
        return self.problem.criterion(outputs, part)

    def structure(self, model: nn.Module) -> Structure:
        return self.problem.structure(model)

    def values(self, model: nn.Module, seed: int) -> Fill:
        fill = self.problem.values(model, seed)

        def fill_double(name: str, tensor: Tensor) -> None:
            single = tensor.float() if tensor.is_floating_point() else tensor
            fill(name, single)
            tensor.copy_(single)

        return fill_double

    def call(self, model: nn.Module, inputs: Any) -> Any:
        return self.problem.call(model, inputs)


@dataclass(frozen=True)
class Watched(Knob):
    """An optimizer knob whose optimizers record the gradients of each of their steps."""

    inner: Knob
    gradients: dict[Tensor, list[Tensor]] = field(default_factory=dict)  # by parameter, one per step

    stage = Stage.OPTIMIZER

    def apply(self, rig: Rig) -> Rig:
        make = self.inner.apply(rig).make_optimizer

        def make_watched(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = make(parameters)
            optimizer.register_step_pre_hook(self.note)
            return optimizer

        return replace(rig, make_optimizer=make_watched)

    def note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:  # a parameter that rests in this step has none
                    self.gradients.setdefault(parameter, []).append(whole(parameter.grad, parameter).clone())


@dataclass(frozen=True)
class Trained:
    """The results of some steps, by name: everything in which two ways of training could differ."""

    losses: list[Tensor]
    updates: list[Update]
    gradients: dict[str, Tensor]  # (steps, ...) each
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def train(
    task: Problem | InDouble,
    knobs: Mapping[str, Knob],
    sizes: list[int],
    *,
    device: torch.device = CPU,
    lr: float | None = None,
) -> Trained:
    """Assemble a rig and take a step on a batch of each of `sizes` samples; each rank takes its slice. `lr` replaces
    the optimizer's learning rate."""
    optimizer = next(name for name, knob in knobs.items() if knob.stage is Stage.OPTIMIZER)  # masks come after it
    watch = Watched(knobs[optimizer])
    watched = {**knobs, optimizer: watch}
    rig = assemble(task, watched, device)
    if lr is not None:
        rig.stepper.set_lr(lr)
    torch.manual_seed(0)  # for dropout
    dtype = next(rig.model.parameters()).dtype
    slices = (my_slice(batch) for batch in batches(task.spec, sizes, dtype))
    losses, updates = zip(*(step(rig, part.to(device)) for part in slices), strict=True)
    names = {**{parameter: name for name, parameter in rig.model.named_parameters()}, **rig.names_of_updated}
    gradients = {names[original(each)]: torch.stack(steps).to(device) for each, steps in watch.gradients.items()}
    buffers, stages = {name: each for name, each in rig.model.named_buffers() if name != SLOTS}, stages_of(rig.model)
    buffers = buffers if stages is None else stages.kept_here(buffers)
    parameters = {name: whole(parameter) for name, parameter in rig.model.named_parameters()}
    return Trained(list(losses), list(updates), gradients, parameters, buffers)


def leaves_something_behind(**choices: str | Knob) -> bool:
    """Whether a step whose loss is nan changes what the next one depends on, as knobs do that break UNDOABLE_STEPS."""
    task = PROBLEMS["transformer"]
    rig, batch = assemble(task, knobs_of(**choices), CPU), make_batch(task.spec, 4)
    step(rig, batch)
    before = deepcopy([rig.model.state_dict(), rig.stepper.state_dict()])
    poisoned = replace(rig, criterion=lambda outputs, part: rig.criterion(outputs, part) * math.nan)
    assert not step(poisoned, batch)[1].applied
    pairs = zip(tree_leaves(before), tree_leaves([rig.model.state_dict(), rig.stepper.state_dict()]), strict=True)
    return not all(torch.equal(one, other) if isinstance(one, Tensor) else one == other for one, other in pairs)


def relative_error(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The norm of all differences, relative to the norm of `wanted`; 0 if and only if all are equal to the bit."""
    assert found.keys() == wanted.keys()
    difference = sum(square_sum(found[name].detach().double() - wanted[name].detach().double()) for name in wanted)
    return (difference / sum(map(square_sum, wanted.values()))) ** 0.5 if difference else 0.0


def square_sum(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().sum())


def peak_as_measured(problem: Problem, knobs: Mapping[str, Knob], batch: int | Part) -> Peak:
    """The ledger of a step after the first, which makes the optimizer's state, on a batch or on one of so many random
    samples."""
    rig, batch = assemble(problem, knobs, CPU), batch if isinstance(batch, Part) else make_batch(problem.spec, batch)
    step(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors(), teacher=rig.teacher) as peak:
        step(rig, batch)
    return peak


def peak_as_planned(problem: Problem, knobs: Mapping[str, Knob], batch_size: int) -> Sums:
    """The planned memory on a CPU of a step after the first. Knobs that a CPU can't have are left out."""
    possible = {name: knob for name, knob in knobs.items() if not knob.needs() & Target().absent().keys()}
    return trace(problem, possible, batch_size, Target()).sums(is_steady=True)
