"""Puts the rig together: checks for conflicts, then applies the knobs, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.config.errors import Incompatible
from lowvram.core import host
from lowvram.core.copies import lend_gradients, real_views
from lowvram.core.device import absent_facts
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import WRITES, Knob, Stage, conflicts, model_facts, row_shape
from lowvram.core.layouts import update_by_layout
from lowvram.core.ledger import announce
from lowvram.core.mesh import all_ranks, lay_out
from lowvram.core.misfits import with_reasons
from lowvram.core.probes.compilable import CompileObstacles
from lowvram.core.rig import MakeOptimizer, Part, Rig, Task
from lowvram.core.shared_memory import names_sharing
from lowvram.core.states import add_hooks, refusing_thawed
from lowvram.core.structure import BLOCKS, Blocks, Structure, lacking
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
    shared = names_sharing(rig.model)
    rig = apply_stage(Stage.PROCESS, knobs, rig)
    known = task.structure(rig.model)
    check_conflicts(known, knobs, absent_facts(device, all_ranks().size) if absent is None else absent)
    check_compilable(known, knobs)
    lay_out(device, row_shape(knobs.values(), all_ranks().size))
    for stage in list(Stage)[1:]:
        rig = apply_stage(stage, knobs, rig)
        if stage is Stage.PARTITION:
            for knob in knobs.values():
                knob.partition(rig)
        if stage is Stage.BUILD:
            check_something_trains(rig.model)
            check_updates(rig.model, device)
        if stage is Stage.SHARD:
            rig = task.with_teacher(with_values(rig, seed))
            check_still_shared(rig.model, shared)
        if stage is Stage.OPTIMIZER:
            rig = replace(rig, make_optimizer=with_hooks(rig.make_optimizer))
        if stage is Stage.STEPPING:
            rig = rig.over_time(rig, seed)
    rig = task.with_added_loss(rig)
    return replace(rig, run=refusing_thawed(with_reasons(rig.run, knobs), rig.model))


def check_conflicts(known: Structure, knobs: Mapping[str, Knob], absent: Mapping[Fact, str]) -> None:
    """Raises Incompatible for all conflicts between the knobs, and with the absent facts of the machine and of the
    model; or BadInput if the model can't be called on such data, or has no blocks of the class that the user names."""
    known.get(Blocks())
    if reasons := conflicts(knobs, absent, lacking(known, model_facts(knobs.values()))):
        raise Incompatible("; ".join(reasons))


def with_values(rig: Rig, seed: int) -> Rig:
    """The rig whose weights have memory and initial values."""
    materialise(rig.model, rig.task.values(rig.model, seed), rig.device)
    rig.model.train()  # as the model overrides it: its constructor may have left any mode
    return rig


def with_hooks(make: MakeOptimizer) -> MakeOptimizer:
    """`make`, for parameters that may be complex, sharded or in host memory."""

    def make_hooked(parameters: list[nn.Parameter]) -> Optimizer:
        views = real_views(parameters)
        updated = [views.get(parameter, parameter) for parameter in parameters]
        optimizer = make(updated)
        add_hooks(optimizer, updated)
        update_by_layout(optimizer, updated)
        if views:
            lend_gradients(optimizer, views)
        return optimizer

    return make_hooked


def check_updates(model: nn.Module, device: torch.device) -> None:
    """Raises Incompatible if weights that train share memory on a card."""
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    groups = [group for group in names_sharing(model) if not trained.isdisjoint(group)]
    if groups and device.type == "cuda":
        raise Incompatible(f"{parted(groups)}: a card updates many weights at once, and so loses updates of such ones")


def check_still_shared(model: nn.Module, shared: list[list[str]]) -> None:
    """Raises Incompatible if weights don't share memory any more that did as the task made the model."""
    now = {frozenset(group) for group in names_sharing(model)}
    names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    for group in shared:
        if names.issuperset(group) and frozenset(group) not in now:
            raise Incompatible(f"{parted([group])}: with these options they would come apart")


def parted(shared: list[list[str]]) -> str:
    return f"{' and '.join(shared[0])} share memory without being one parameter: make them one, or copy the values"


def check_compilable(known: Structure, knobs: Mapping[str, Knob]) -> None:
    """Raises Incompatible if the model's forward pass does what compiled graphs would get wrong, or would do otherwise
    when they are computed again."""
    compiling = [name for name, knob in knobs.items() if is_compiler(knob)]
    if not compiling:
        return
    in_blocks = BLOCKS in knobs[compiling[0]].needs()
    again = [name for name, knob in knobs.items() if knob.stage is Stage.CHECKPOINT and BLOCKS in knob.needs()]
    unrepeatable, uncompilable = known.get(CompileObstacles(bool(again), in_blocks))
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
    return [*apply_stage(Stage.BUILD, knobs, bare_rig(task, torch.device("meta"))).structure.get(Blocks()).blocks]


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
