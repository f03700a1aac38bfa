"""Some steps of a model of the zoo: by a plain loop of torch, and by lowvram's step with a knob."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lowvram
from lowvram.api import ModuleTask, cross_entropy
from lowvram.compat.torch_trees import tree_leaves, tree_map
from lowvram.core.assemble import assemble
from lowvram.core.copies import original
from lowvram.core.generators import seed_all
from lowvram.core.knob import Knob
from lowvram.core.shards import whole
from lowvram.knobs.optimizer import SGD
from tests.laboratory import CPU, KNOBS, Watched, knobs_of
from tests.zoo.foreign import Foreign

LR, MOMENTUM = 0.02, 0.9
PLAIN_SGD = SGD(lr=LR, momentum=MOMENTUM)
Batches = list[tuple[Any, Any]]  # inputs and targets of one step after another
Named = Mapping[str, Tensor]
FOUND: dict[Any, Any] = {}  # the blocks of each model, so that they aren't looked for some two hundred times


@dataclass(frozen=True)
class Trained:
    """Everything in which two ways of training could differ."""

    losses: list[float]
    first: Named  # parameters before the first step
    last: Named  # and after the last
    buffers: Named  # those that aren't saved, too
    others: Mapping[str, Any]  # numbers that modules keep as attributes
    saved: frozenset[str]  # the names in the model's state
    gradients: Mapping[str, list[Tensor]]  # of each step in which a parameter has one
    frozen: frozenset[str]  # parameters that the model's author has frozen


@contextmanager
def default_format(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make(foreign: Foreign) -> nn.Module:
    """The model with its initial values."""
    seed_all(0)
    return foreign.make()


def batches(foreign: Foreign, *sizes: int) -> Batches:
    seed_all(1)
    return [(foreign.inputs(size), foreign.targets(size)) for size in sizes]


def cut(tree: Any, parts: int, at: int) -> Any:
    return tree_map(lambda tensor: tensor.tensor_split(parts)[at], tree)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """With the numbers of conf/optimizer/adamw.yaml: biases and norms don't decay."""
    groups = [
        {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([each for each in groups if each["params"]], lr=1e-3, betas=(0.9, 0.95), eps=1e-8)


def standing_still(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def plain(
    foreign: Foreign,
    data: Batches,
    *,
    parts: int = 1,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = sgd,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    scaler: torch.amp.GradScaler | None = None,
) -> Trained:
    """A loop as anybody would write it. The losses of parts are divided by the number of targets of the whole batch."""
    model, scaler = make(foreign).train(), scaler or torch.amp.GradScaler("cpu", enabled=False)
    optimizer = make_optimizer([each for each in model.parameters() if each.requires_grad])
    first, losses, gradients = parameters_of(model), list[float](), dict[str, list[Tensor]]()
    for step, (inputs, targets) in enumerate(data):
        seed_all(100 + step)
        optimizer.zero_grad()
        leaves = tree_leaves(targets)
        num_parts, of_parts = min(parts, len(leaves[0])), list[float]()
        for at in range(num_parts):
            x, y = cut(inputs, num_parts, at), cut(targets, num_parts, at)
            with autocast():
                outputs = model(**x) if isinstance(x, dict) else model(x)
                loss = foreign.loss(model, outputs, y) / sum(leaf.numel() for leaf in leaves)
            scaler.scale(loss).backward()
            of_parts.append(loss.item())
        losses.append(sum(of_parts))
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.grad is not None:
                gradients.setdefault(name, []).append(parameter.grad.clone())
        scaler.step(optimizer)
        scaler.update()
    return result(model, losses, first, gradients)


def with_knob(foreign: Foreign, data: Batches, group: str, knob: Knob | str, lr: float | None = None) -> Trained:
    """The same by lowvram's step, with one knob; the optimizer is SGD unless the knob is one."""
    model = make(foreign)
    watch = Watched((KNOBS[group, knob] if isinstance(knob, str) else knob) if group == "optimizer" else PLAIN_SGD)
    rig = rigged(foreign, model, data, {group: knob, "optimizer": watch})
    if lr is not None:
        rig.stepper.set_lr(lr)
    first, losses = parameters_of(rig.model), list[float]()
    for step, (inputs, targets) in enumerate(data):
        seed_all(100 + step)
        losses.append(lowvram.step(rig, lowvram.Part(inputs, targets))[0].item())
    steps_of = {original(each): steps for each, steps in watch.gradients.items()}
    named = rig.model.named_parameters(remove_duplicate=False)
    return result(rig.model, losses, first, {name: steps_of[each] for name, each in named if each in steps_of})


def rigged(foreign: Foreign, model: nn.Module, data: Batches, chosen: Mapping[str, Knob | str]) -> lowvram.Rig:
    task = task_of(foreign, model, data)
    found = FOUND.setdefault((foreign, torch.get_default_dtype()), task.found)
    return assemble(replace(task, found=found), knobs_of(**chosen), CPU)


def task_of(foreign: Foreign, model: nn.Module, data: Batches) -> ModuleTask:
    """The task as a user makes it, with two samples."""
    inputs = tree_map(lambda tensor: tensor[:2], data[0][0])
    criterion = cross_entropy if foreign.criterion is None else partial(foreign.criterion, model)
    return lowvram.task(model, inputs, criterion)


def result(model: nn.Module, losses: list[float], first: Named, gradients: Mapping[str, list[Tensor]]) -> Trained:
    buffers = {name: whole(each).detach().clone() for name, each in model.named_buffers()}
    others = {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, int | float) and not key.startswith("_")
    }
    saved = frozenset(model.state_dict())
    frozen = frozenset(name for name, each in model.named_parameters() if not each.requires_grad)
    return Trained(losses, first, parameters_of(model), buffers, others, saved, gradients, frozen)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: whole(each).detach().clone() for name, each in named}


def differences(found: Trained, wanted: Trained) -> dict[str, float]:
    """How far two results are apart: losses, the ways of all parameters together, each buffer, each number."""
    ways = ({name: each.last[name] - each.first[name] for name in each.first} for each in (found, wanted))
    errors = {"losses": relative(torch.tensor(found.losses), torch.tensor(wanted.losses)), "parameters": of_all(*ways)}
    errors |= {f"buffer {name}": relative(found.buffers[name], each) for name, each in wanted.buffers.items()}
    return errors | {name: float(found.others[name] != each) for name, each in wanted.others.items()}


def of_all(found: Named, wanted: Named) -> float:
    """The norm of all differences, relative to that of `wanted`."""
    assert found.keys() == wanted.keys(), f"names: {sorted(found.keys() ^ wanted.keys())}"
    return relative(*(torch.cat([real(each[name]) for name in wanted]) for each in (found, wanted)))


def real(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).flatten()


def relative(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference relative to that of `wanted`; infinite if the shapes differ."""
    if found.shape != wanted.shape:
        return float("inf")
    difference, size = (float(each.abs().double().norm()) for each in (found - wanted, wanted))
    return difference / size if size else difference


def slopes(foreign: Foreign, num_samples: int, group: str, knob: Knob | str) -> tuple[float, float]:
    """The derivative of a step's own loss along a random direction of the parameters: by finite differences of the
    loss, and by the step's update."""
    data = batches(foreign, num_samples)

    def step_at(shift: float) -> tuple[float, float]:
        """The loss, and the slope by the update, at weights that are moved so far along the direction."""
        model = make(foreign)
        rig = rigged(foreign, model, data, {group: knob, "optimizer": SGD(lr=1.0, momentum=0.0)})
        trained = [each for each in model.parameters() if each.requires_grad]
        seed_all(3)
        direction = [torch.randn_like(each) for each in trained]
        with torch.no_grad():
            for each, way in zip(trained, direction, strict=True):
                each += shift * way + 0.1 * torch.randn_like(
                    way
                )  # away from where it was made: a unit may stand at its kink
        before = [each.detach().clone() for each in trained]
        seed_all(100)
        loss = lowvram.step(rig, lowvram.Part(*data[0]))[0].item()
        moved = zip(before, trained, direction, strict=True)
        return loss, sum(((old - new.detach()) * way).sum().item() for old, new, way in moved)

    size = 1e-6
    after, before, here = step_at(size), step_at(-size), step_at(0.0)
    return (after[0] - before[0]) / (2 * size), here[1]
