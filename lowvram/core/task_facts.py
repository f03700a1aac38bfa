"""Which facts a task and its model lack, each with what the user can do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from torch import nn

from lowvram.core.knob import Fact
from lowvram.core.layers import convolutions, inner_linears, is_plain_linear, layer_norms, rms_norms
from lowvram.core.rig import Task
from lowvram.core.shared_memory import names_sharing

Reason = Callable[[Task, nn.Module], str | None]  # why a model lacks a fact, and what to do; None if it has the fact


def unless(has: Callable[[Task, nn.Module], object], remedy: str) -> Reason:
    """The reason `remedy` where `has` finds nothing in the task's model."""
    return lambda task, model: None if has(task, model) else remedy


def no_blocks(task: Task, model: nn.Module) -> str | None:
    if task.blocks(model):
        return None
    why = task.blocks_trouble(model)
    trouble = "" if why is None else f", as the model can't be tried without memory ({why})"
    return f"none were found{trouble}: name their class with model.blocks=CLASS"


def has_exits(task: Task, model: nn.Module) -> bool:
    tail = task.tail(model)
    return tail is not None and len(tail.blocks) > 1


def has_inner_linears(task: Task, model: nn.Module) -> bool:
    return bool(inner_linears(model, task.last_weights(model)))


def complex_weight(task: Task, model: nn.Module) -> str | None:
    del task
    name = next((name for name, each in model.named_parameters() if each.is_complex()), None)
    return None if name is None else f"{name} is: leave that option, or keep it as two real weights"


def shared_memory(task: Task, model: nn.Module) -> str | None:
    del task
    groups = names_sharing(model)
    return f"{' and '.join(groups[0])} do: make them one parameter, or copy the values" if groups else None


def written(name: str | None) -> str | None:
    remedy = "compute a new tensor from it there, or choose another option"
    return None if name is None else f"it writes into {name}: {remedy}"


def stray(clause: str | None) -> str | None:
    return None if clause is None else f"{clause}: leave offload=none and sharding=none, or choose sharding=ddp"


def unshardable(model: nn.Module, blocks: Sequence[nn.Module]) -> str | None:
    """Why FSDP2 can't shard a weight of the model, block by block, and what to do; None if it can."""
    num_blocks_with = Counter(weight for block in blocks for weight in set(block.parameters()))
    in_blocks = {module for block in blocks for module in block.modules()}
    outside = {
        weight: name
        for name, module in model.named_modules()
        if module not in in_blocks
        for weight in module.parameters(recurse=False)
    }
    for name, weight in model.named_parameters():
        if weight.dim() == 0:
            return f"{name} is a single number: make it a vector of one, as by torch.ones(1)"
        if weight.numel() == 0:
            return f"{name} of shape {tuple(weight.shape)} is empty: leave it out"
        if num_blocks_with[weight] > 1:
            return f"{name} is in {num_blocks_with[weight]} blocks: give each a weight of its own, or leave that option"
        if weight in num_blocks_with and weight in outside:
            user = outside[weight] or "the model itself"
            return (
                f"{name} is in a block, and {user}, outside of the blocks, has it, too: give each a weight of its own,"
                " or leave that option"
            )
    return None


LEAVE_TILE, LEAVE_DEPTH = "leave tile=none", "not known of this model: leave depth=none"
# Of these facts trial forward passes, or several, tell whether the task lacks them.
REASONS_BY_TRIAL: dict[Fact, Reason] = {
    Fact.MLPS: unless(
        lambda task, model: task.mlps(model),
        f"none were found: {LEAVE_TILE} or, if they have unusual names, list those in tile.names",
    ),
    Fact.SEPARATE_SAMPLES: unless(
        lambda task, model: task.separate_blocks(model),
        f"not known of this model: {LEAVE_TILE}, and choose ckpt and accum",
    ),
    Fact.SKIPPABLE: unless(lambda task, model: len(task.same_shape_blocks(model)) > 1, LEAVE_DEPTH),
    Fact.BRANCHES: unless(lambda task, model: task.branches(model) or task.same_shape_blocks(model), LEAVE_DEPTH),
    Fact.NORMS: unless(
        lambda _, model: layer_norms(model) or rms_norms(model), "this model has none: leave norms=input"
    ),
    Fact.NO_RANDOMNESS: lambda task, model: task.drawn_by(model) or None,
    Fact.SHARDABLE: lambda task, model: unshardable(model, task.blocks(model)) or stray(task.stray(model)),
    Fact.STEADY_WEIGHTS: lambda task, model: written(task.written(model)[0]),
    Fact.STEADY_BLOCKS: lambda task, model: written(task.written(model)[1]),
}
REASONS: dict[Fact, Reason] = REASONS_BY_TRIAL | {
    Fact.HEAD: unless(
        lambda task, model: (head := task.head(model)) is not None and is_plain_linear(head),
        "this task has no linear layer whose product the model returns as it is, without a hook, a forward pass of its"
        " own or a change afterwards: leave logits=full, and list what trains in adapter.train",
    ),
    Fact.BLOCKS: no_blocks,
    Fact.EXITS: unless(has_exits, LEAVE_DEPTH),
    Fact.INNER_LINEARS: unless(
        has_inner_linears, "this model has none: leave qat=none (qat=int8 takes convolutions too)"
    ),
    Fact.INNER_PRODUCTS: unless(
        lambda task, model: has_inner_linears(task, model) or convolutions(model),
        "this model has none: leave qat=none",
    ),
    Fact.PLAIN_BLOCKS: unless(
        lambda task, model: not task.blocks(model) or task.has_plain_blocks(model),
        "this model calls its blocks otherwise: choose compile=blocks or compile=none",
    ),
    Fact.FEW_SHAPES: unless(
        lambda task, _: task.has_few_shapes(),
        "here nearly every batch has its own shape: choose compile=blocks with compile.dynamic=true",
    ),
    Fact.HARD_TARGETS: unless(
        lambda task, _: not task.has_soft_targets(),
        "this task has a teacher, whose predictions count, too: choose logits=chunked",
    ),
    Fact.REAL_WEIGHTS: complex_weight,
    Fact.SEPARATE_MEMORY: shared_memory,
}
BY_TRIAL = frozenset(REASONS_BY_TRIAL)
# The facts that `absent_of` may return: knobs that need none of them can be checked without making a model.
TASK_FACTS = frozenset(REASONS)


def absent_of(task: Task, model: nn.Module, asked: frozenset[Fact] = TASK_FACTS) -> dict[Fact, str]:
    """Those of the facts asked about that a task lacks, each with what the user can do about it."""
    reasons = {fact: reason(task, model) for fact, reason in REASONS.items() if fact in asked}
    return {fact: reason for fact, reason in reasons.items() if reason is not None}
