"""Trials of a user's criterion on a few samples: whether it returns a sum over them, and what else it depends on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_trees import tree_leaves, tree_map
from lowvram.config.texts import first_line
from lowvram.core.rig import IGNORE

PLAIN = (Tensor, int, float, complex, str)
SAME = 1e-3  # relative difference up to which two losses count as equal
NEAR = 0.5  # below which the loss of the same samples twice is rather a mean than a sum
LINE_OF_SUM = "it is divided by the number of targets, so it must be a sum over them"

Criterion = Callable[[Any, Any], Any]


@final
@dataclass(frozen=True)
class Trial:
    """The losses of some samples, and of the same samples twice."""

    samples: str = "one sample"
    once: float = 0.0
    twice: float = 0.0
    is_mean: bool = False
    doubt: str | None = None  # what isn't known of the loss
    weights: list[Tensor] = field(default_factory=list)  # that the loss has gradients for, besides the outputs


def tried(criterion: Criterion, outputs: Any, targets: Any) -> Trial:
    """Call the criterion on one sample, or on two where one isn't enough, and on the same twice. Only tensors with a
    row for each sample are cut: others are the same for all of them."""
    num_samples, opaque = rows_of(targets), opaque_in(outputs)
    if num_samples is None or opaque is not None:
        what = "the targets have no rows" if opaque is None else f"outputs of class {opaque} can't be taken apart"
        return Trial(doubt=f"not known to return a sum, as {what}: {LINE_OF_SUM}")
    first = first_that_counts(targets, num_samples)
    why = "nan"
    for samples in dict.fromkeys(((first,), (first, (first + 1) % num_samples))):
        again = Again(criterion, outputs, targets, num_samples)
        try:
            loss = again.loss(samples)
            once, twice = number(loss), number(again.loss(samples * 2))
        except Exception as error:  # of the user's own code: if it fails on all samples, too, the user sees that
            why = f"{type(error).__name__}: {first_line(error)}"
            continue
        if math.isfinite(once) and math.isfinite(twice):
            return judged(again, samples, once, twice, loss)
    few = f"it can't be computed of {'one sample' if num_samples == 1 else 'two samples'} ({why})"
    return Trial(doubt=f"not known to return a sum, as {few}: {LINE_OF_SUM}")


def judged(again: Again, samples: tuple[int, ...], once: float, twice: float, loss: Any) -> Trial:
    tolerance = tolerance_of(loss)
    is_same = bool(once) and abs(twice - once) <= tolerance * abs(once)
    numbers = again.numbers_used(samples, once, twice, tolerance) if again.has_numbers else []
    doubt, is_mean = None, is_same
    if numbers:
        names = " and ".join(shown(each) for each in numbers)
        doubt = (
            f"it depends on {names} of the model's outputs, one number for all samples: {LINE_OF_SUM}. If that number"
        )
        doubt += " is a mean, multiply it by the number of targets"
        is_factor = any(again.is_factor(each, samples, once) for each in numbers)  # such as the number of samples
        is_mean = is_same and not is_factor and again.depends_on_samples(samples, once, tolerance)
    elif once and not is_same and abs(twice - once) < NEAR * abs(once):
        doubt = f"for the same samples twice it is {twice:.4g}, where a sum would be twice {once:.4g}: {LINE_OF_SUM}"
    return Trial(
        "one sample" if len(samples) == 1 else "two samples", once, twice, is_mean, doubt, weights_behind(loss)
    )


def tolerance_of(loss: Any) -> float:
    """Half-precision losses are rounded by more than `SAME`."""
    return max(SAME, 4 * torch.finfo(loss.dtype).eps) if isinstance(loss, Tensor) else SAME


@final
class Again:
    """Computes a criterion again on some of the samples."""

    def __init__(self, criterion: Criterion, outputs: Any, targets: Any, num_samples: int) -> None:
        self.criterion, self.outputs, self.targets, self.num_samples = criterion, outputs, targets, num_samples
        leaves = tensors_of(outputs)
        self.numbers = [at for at, leaf in enumerate(leaves) if leaf.dim() == 0 and leaf.is_floating_point()]

    @property
    def has_numbers(self) -> bool:
        return bool(self.numbers)

    def loss(self, samples: Sequence[int], raised: int | None = None) -> Any:
        """The loss of these samples.

        Args:
            raised: a 0-dim output that is raised by one, by its place among the tensors; None: none is.
        """
        outputs = self.outputs
        if raised is not None:
            target = tensors_of(outputs)[raised]
            outputs = mapped(outputs, lambda leaf: leaf.detach() + 1 if leaf is target else leaf)
        return self.criterion(
            chosen(outputs, samples, self.num_samples), chosen(self.targets, samples, self.num_samples)
        )

    def numbers_used(self, samples: tuple[int, ...], once: float, twice: float, tolerance: float) -> list[int]:
        """The 0-dim outputs that the loss has as they are, however many samples there are."""
        used = []
        for at in self.numbers:
            with torch.no_grad():
                by_one = number(self.loss(samples, at)) - once
                by_two = number(self.loss(samples * 2, at)) - twice
            if abs(by_one) > 1e-6 * max(1.0, abs(once)) and abs(by_two - 2 * by_one) > 10 * tolerance * abs(by_one):
                used.append(at)
        return used

    def is_factor(self, at: int, samples: tuple[int, ...], once: float) -> bool:
        """Whether the loss is a multiple of a 0-dim output."""
        with torch.no_grad():
            by_one, value = number(self.loss(samples, at)) - once, float(tensors_of(self.outputs)[at])
        return abs(by_one * value - once) <= SAME * abs(once)

    def depends_on_samples(self, samples: tuple[int, ...], once: float, tolerance: float) -> bool:
        """Whether other samples have another loss, or it is the model's own number alone."""
        others = [at for at in range(min(self.num_samples, 4)) if at not in samples]
        with torch.no_grad():
            return any(abs(number(self.loss((at,) * len(samples))) - once) > tolerance * abs(once) for at in others)


def shown(place: int) -> str:
    return f"tensor {place + 1}"


def number(loss: Any) -> float:
    return float(loss.detach()) if isinstance(loss, Tensor) and loss.dim() == 0 else 0.0  # others are refused later


def weights_behind(loss: Any) -> list[Tensor]:
    """The leaves that a loss of detached outputs has gradients for."""
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        return []
    if loss.grad_fn is None:
        return [loss]
    seen, found = set[Any](), list[Tensor]()
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(variable := getattr(node, "variable", None), Tensor):
            found.append(variable)
        nodes.extend(next_node for next_node, _ in node.next_functions)
    return found


def whole_and_halves(criterion: Criterion, outputs: Any, targets: Any) -> tuple[float, float] | None:
    """The loss of the samples, and the sum of those of both halves, if they differ; of one sample, that of the same
    twice. None if they are equal, or can't be computed."""
    num_samples = rows_of(targets)
    if num_samples is None or opaque_in(outputs) is not None:
        return None  # the first trial has told so
    again, samples = (
        Again(criterion, outputs, targets, num_samples),
        list(range(num_samples)) * (1 + (num_samples == 1)),
    )
    half = len(samples) // 2
    try:
        loss = again.loss(samples)
        whole, halves = number(loss), number(again.loss(samples[:half])) + number(again.loss(samples[half:]))
    except Exception:  # of the user's own code, which may need as many samples as there are
        return None
    is_equal = abs(whole - halves) <= tolerance_of(loss) * max(abs(whole), abs(halves)) or whole == halves
    return None if is_equal else (whole, halves)


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors, also those in the fields of objects."""
    leaves = tree_leaves(tree)
    in_fields = (each for leaf in leaves for each in tree_leaves(list(fields_of(leaf).values())))
    return [each for each in (*leaves, *in_fields) if isinstance(each, Tensor)]


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of an object of the user's own class, such as a dataclass for a model's outputs; {} of others."""
    if isinstance(value, (*PLAIN, type, nn.Module)):
        return {}
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return dict(getattr(value, "__dict__", {}))


def counts_ignored_floats(criterion: Criterion, outputs: Any, targets: Any) -> bool:
    """Whether the loss of a target that is a float depends on it near `IGNORE` as at any other value, so that the
    criterion doesn't leave such targets out."""
    num_samples = rows_of(targets)
    if num_samples is None or opaque_in(outputs) is not None or not any(map(is_float, tensors_of(targets))):
        return False
    outputs, targets = (chosen(tree, (0,), num_samples) for tree in (outputs, targets))

    def loss_at(value: float) -> float:
        changed = mapped(targets, lambda leaf: torch.full_like(leaf, value) if is_float(leaf) else leaf)
        return number(criterion(outputs, changed))

    try:
        at, near, further = (loss_at(IGNORE - distance) for distance in (0.0, 1.0, 2.0))
    except Exception:  # of the user's own code, which may check values
        return False
    return at != near and abs(near - at) <= 2 * abs(further - near)


def is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


def opaque_in(outputs: Any) -> str | None:
    """The name of a class whose objects can't be taken apart, of one in the outputs; None if there is none."""
    opaque = (leaf for leaf in tree_leaves(outputs) if not (leaf is None or isinstance(leaf, PLAIN) or fields_of(leaf)))
    return next((type(leaf).__name__ for leaf in opaque), None)


def rows_of(targets: Any) -> int | None:
    """The number of samples, which is that of the rows of the targets; None if they have none."""
    return next((len(leaf) for leaf in tensors_of(targets) if leaf.dim() and len(leaf)), None)


def first_that_counts(targets: Any, num_samples: int) -> int:
    """The index of the first sample with a target that isn't `IGNORE`; 0 if there is none."""
    leaves = [leaf for leaf in tensors_of(targets) if leaf.dim() and len(leaf) == num_samples]
    counted = [(leaf != IGNORE).flatten(1).any(1) if leaf.dim() > 1 else leaf != IGNORE for leaf in leaves]
    return int(torch.stack(counted).any(0).int().argmax())


def chosen(tree: Any, samples: Sequence[int], num_samples: int) -> Any:
    """The rows of these samples, of all tensors that have a row for each sample; without gradients."""

    def rows(leaf: Tensor) -> Tensor:
        leaf = leaf.detach()
        index = torch.tensor(samples, device=leaf.device)
        return leaf.index_select(0, index) if leaf.dim() and len(leaf) == num_samples else leaf

    return mapped(tree, rows)


def mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same, with each tensor changed, also those in the fields of objects, which are copied."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if not (of_leaf := fields_of(leaf)):
            return leaf
        twin = copy(leaf)
        for name, value in tree_map(changed, of_leaf).items():
            object.__setattr__(twin, name, value)  # a frozen dataclass too
        return twin

    return tree_map(changed, tree)
