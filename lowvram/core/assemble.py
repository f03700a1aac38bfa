"""Puts the rig together: checks for conflicts, then applies the knobs, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial

import torch
from torch import nn

from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.config.errors import Incompatible
from lowvram.core import host
from lowvram.core.device import absent_facts
from lowvram.core.knob import WRITES, Fact, Kind, Knob, Stage, conflicts
from lowvram.core.layers import convolutions, inner_linears, layer_norms, rms_norms
from lowvram.core.ledger import announce
from lowvram.core.misfits import with_reasons
from lowvram.core.ranks import num_ranks
from lowvram.core.real_views import with_real_views
from lowvram.core.rig import Part, Rig, Task
from lowvram.core.shared_memory import names_sharing
from lowvram.core.states import with_load_hooks
from lowvram.core.trainable import check_something_trains, check_trainable
from lowvram.core.values import materialise


def assemble(
    task: Task,
    knobs: Mapping[str, Knob],
    device: torch.device,
    seed: int = 0,
    absent: Mapping[Fact, str] | None = None,
) -> Rig:
    """The rig that trains `task` with `knobs` on `device`.

    Args:
        knobs: by the name that messages use for each, such as "precision=bf16". Within a stage they act in
            the mapping's order.
        seed: initial weights are a function of it and of each parameter's name.
        absent: facts that the device lacks, each with what the user can do about it; None: those that this
            machine lacks.

    Raises:
        Incompatible: all conflicts between the knobs, or with this machine, in one message, before any
            weight has memory.
    """
    rig = bare_rig(task, device)
    check_trainable(rig.model)
    model, shared = rig.model, names_sharing(rig.model)
    rig = apply_stage(Stage.PROCESS, knobs, rig)
    absent = absent_facts(device, num_ranks()) if absent is None else absent
    needed = frozenset[Fact]().union(*(knob.needs() for knob in knobs.values()))
    if shared and device.type == "cuda":
        raise Incompatible(f"{parted(shared)}: a card updates many weights at once, and so loses updates of such ones")
    if reasons := conflicts(knobs, {**absent, **absent_of(task, model, needed)}):
        raise Incompatible("; ".join(reasons))
    check_compilable(task, model, knobs)
    for stage in list(Stage)[1:]:
        rig = apply_stage(stage, knobs, rig)
        if stage is Stage.BUILD:
            check_something_trains(rig.model)
        if stage is Stage.SHARD:
            materialise(rig.model, rig.task.values(rig.model, seed), rig.device)
            rig.model.train()  # as the model overrides it: its constructor may have left any mode
            rig = task.with_teacher(rig)
            check_still_shared(rig.model, shared)
        if stage is Stage.OPTIMIZER:
            rig = replace(rig, make_optimizer=with_real_views(with_load_hooks(rig.make_optimizer)))
        if stage is Stage.STEPPING:
            rig = rig.over_time(rig, seed)
    rig = task.with_added_loss(rig)
    return replace(rig, run=with_reasons(rig.run, knobs))


def check_still_shared(model: nn.Module, shared: list[list[str]]) -> None:
    """Raises Incompatible if weights don't share memory any more that did as the task made the model."""
    now = {frozenset(group) for group in names_sharing(model)}
    names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    for group in shared:
        if names.issuperset(group) and frozenset(group) not in now:
            raise Incompatible(f"{parted([group])}: with these options they would come apart")


def parted(shared: list[list[str]]) -> str:
    return f"{' and '.join(shared[0])} share memory without being one parameter: make them one, or copy the values"


def check_compilable(task: Task, model: nn.Module, knobs: Mapping[str, Knob]) -> None:
    """Raises Incompatible if the model's forward pass does what compiled graphs would get wrong, or would do otherwise
    when they are computed again."""
    compiling = [name for name, knob in knobs.items() if is_compiler(knob)]
    if not compiling:
        return
    in_blocks = Fact.BLOCKS in knobs[compiling[0]].needs()
    again = [name for name, knob in knobs.items() if knob.stage is Stage.CHECKPOINT and Fact.BLOCKS in knob.needs()]
    blocks = task.blocks(model) if again or in_blocks else []
    unrepeatable, uncompilable = task.deeds(model, blocks, blocks if in_blocks else [model])
    if again and unrepeatable is not None:
        raise Incompatible(
            f"{again[0]} in a compiled model needs blocks that change nothing in a forward pass and draw from torch's"
            f" generator alone: {unrepeatable}; choose compile=none"
        )
    if uncompilable is not None:
        raise Incompatible(
            f"torch.compile would get this model wrong without a word, as {uncompilable}, or choose compile=none"
        )


def is_compiler(knob: Knob) -> bool:
    return knob.stage is Stage.COMPILE and Fact.COMPILED not in knob.breaks()


def skeleton(task: Task, knobs: Mapping[str, Knob]) -> nn.Module:
    """The model without memory, after the knobs of stage BUILD."""
    return apply_stage(Stage.BUILD, knobs, bare_rig(task, torch.device("meta"))).model


def block_names(task: Task, knobs: Mapping[str, Knob]) -> list[str]:
    """The names of the blocks in the model of `skeleton`, in the order of the forward pass."""
    rig = apply_stage(Stage.BUILD, knobs, bare_rig(task, torch.device("meta")))
    names = {module: name for name, module in rig.model.named_modules()}
    return [names[block] for block in rig.task.blocks(rig.model)]


def bare_rig(task: Task, device: torch.device) -> Rig:
    """The rig before any knob is applied; its model has no memory."""
    model = bare_model(task)
    return Rig(
        task,
        device,
        model,
        forward=lambda part: task.call(model, part.inputs),
        criterion=task.criterion,
        total=lambda parts: host.moved(torch.stack([task.num_targets(part) for part in parts]).sum(), device),
        move=partial(moved_part, device=device),
    )


def moved_part(part: Part, device: torch.device) -> Part:
    """The part on the device; ledgers count its tensors there as inputs."""
    return part.map(lambda tensor: announce(host.moved(tensor, device), Kind.INPUTS))


def bare_model(task: Task) -> nn.Module:
    """The model without memory. No dispatch mode sees it being built: constructors may read values that they have
    computed on the CPU, and fake tensors have none."""
    with without_dispatch_modes(), torch.device("meta"):
        return task.make_model()


# The facts that `absent_of` may return: knobs that need none of them can be checked without making a model.
# It takes forward passes to find out about these.
BY_TRIAL = frozenset(
    {
        Fact.MLPS,
        Fact.SEPARATE_SAMPLES,
        Fact.NORMS,
        Fact.SKIPPABLE,
        Fact.BRANCHES,
        Fact.NO_RANDOMNESS,
        Fact.STEADY_WEIGHTS,
        Fact.STEADY_BLOCKS,
    }
)
TASK_FACTS = BY_TRIAL | {
    *(Fact.HEAD, Fact.BLOCKS, Fact.EXITS, Fact.INNER_LINEARS, Fact.INNER_PRODUCTS, Fact.PLAIN_BLOCKS, Fact.FEW_SHAPES),
    *(Fact.HARD_TARGETS, Fact.SEPARATE_MEMORY, Fact.REAL_WEIGHTS, Fact.SHARDABLE),
}


def absent_of(task: Task, model: nn.Module, asked: frozenset[Fact] = TASK_FACTS) -> dict[Fact, str]:
    """The facts that a task lacks, each with what the user can do about it.

    Args:
        asked: those of `BY_TRIAL` are only looked for if they are among these.
    """
    absent: dict[Fact, str] = {}
    if task.head(model) is None:
        absent[Fact.HEAD] = "this task names none: leave logits=full, and list what trains in adapter.train"
    if not task.blocks(model):
        why = task.blocks_trouble(model)
        told = (
            "none were found" if why is None else f"none were found, as the model can't be tried without memory ({why})"
        )
        absent[Fact.BLOCKS] = f"{told}: name their class with model.blocks=CLASS"
    if Fact.MLPS in asked and not task.mlps(model):
        absent[Fact.MLPS] = "none were found: leave tile=none or, if they have unusual names, list those in tile.names"
    if Fact.SEPARATE_SAMPLES in asked and not task.separate_blocks(model):
        absent[Fact.SEPARATE_SAMPLES] = "not known of this model: leave tile=none, and choose ckpt and accum"
    if (tail := task.tail(model)) is None or len(tail.blocks) < 2:
        absent[Fact.EXITS] = "not known of this model: leave depth=none"
    if Fact.SKIPPABLE in asked and len(task.same_shape_blocks(model)) < 2:
        absent[Fact.SKIPPABLE] = "not known of this model: leave depth=none"
    if Fact.BRANCHES in asked and not (task.branches(model) or task.same_shape_blocks(model)):
        absent[Fact.BRANCHES] = "not known of this model: leave depth=none"
    if Fact.NORMS in asked and not (layer_norms(model) or rms_norms(model)):
        absent[Fact.NORMS] = "this model has none: leave norms=input"
    if not (linears := inner_linears(model, task.last_weights(model))):
        absent[Fact.INNER_LINEARS] = "this model has none: leave qat=none (qat=int8 takes convolutions too)"
    if not linears and not convolutions(model):
        absent[Fact.INNER_PRODUCTS] = "this model has none: leave qat=none"
    if task.blocks(model) and not task.has_plain_blocks(model):
        absent[Fact.PLAIN_BLOCKS] = "this model calls its blocks otherwise: choose compile=blocks or compile=none"
    if not task.has_few_shapes():
        absent[Fact.FEW_SHAPES] = (
            "here nearly every batch has its own shape: choose compile=blocks with compile.dynamic=true"
        )
    if task.has_soft_targets():
        absent[Fact.HARD_TARGETS] = "this task has a teacher, whose predictions count, too: choose logits=chunked"
    if complex_ones := [name for name, each in model.named_parameters() if each.is_complex()]:
        absent[Fact.REAL_WEIGHTS] = f"{complex_ones[0]} is: leave that option, or keep it as two real weights"
    if (why := unshardable(model, task.blocks(model))) is not None:
        absent[Fact.SHARDABLE] = why
    if shared := names_sharing(model):
        absent[Fact.SEPARATE_MEMORY] = f"{' and '.join(shared[0])} do: make them one parameter, or copy the values"
    if Fact.NO_RANDOMNESS in asked and (who := task.drawn_by(model)):
        absent[Fact.NO_RANDOMNESS] = who
    if asked & {Fact.STEADY_WEIGHTS, Fact.STEADY_BLOCKS}:
        for fact, name in zip((Fact.STEADY_WEIGHTS, Fact.STEADY_BLOCKS), task.written(model), strict=True):
            if name is not None:
                absent[fact] = f"it writes into {name}: compute a new tensor from it there, or choose another option"
    return absent


def unshardable(model: nn.Module, blocks: Sequence[nn.Module]) -> str | None:
    """Why FSDP2 can't shard a weight of the model, block by block, and what to do; None if it can."""
    for name, weight in model.named_parameters():
        if weight.dim() == 0:
            return f"{name} is a single number: make it a vector of one, as by torch.ones(1)"
        if weight.numel() == 0:
            return f"{name} of shape {tuple(weight.shape)} is empty: leave it out"
        holders = [block for block in blocks if any(weight is each for each in block.parameters())]
        if len(holders) > 1:
            return f"{name} is in {len(holders)} blocks: give each a weight of its own, or leave that option"
    return None


def apply_stage(stage: Stage, knobs: Mapping[str, Knob], rig: Rig) -> Rig:
    """The rig after the knobs of one stage. Raises TypeError if a knob writes a field that its stage may not write."""
    for name, knob in knobs.items():
        if knob.stage is stage:
            new = knob.apply(rig)
            changed = {field.name for field in fields(rig) if getattr(new, field.name) is not getattr(rig, field.name)}
            if not changed <= WRITES[stage]:
                raise TypeError(f"{name} wrote {sorted(changed - WRITES[stage])}, which its stage {stage.name} may not")
            rig = new
    return rig
