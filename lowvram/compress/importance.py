"""How important each unit of a model's inner widths is: what structured pruning keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.config.transforms import ImportanceKind
from lowvram.core.rig import Part, Rig
from lowvram.models.widths import InnerWidth


class Importance(ABC):
    """A way to rank the units of each width. Scores of different widths aren't compared."""

    @abstractmethod
    def scores(self, rig: Rig, widths: Sequence[InnerWidth], batches: Iterable[Part]) -> list[Tensor]:
        """A score of each unit of each width, (num_units,) in fp64 on the CPU.

        Args:
            rig: its model is in evaluation mode.
            batches: logical batches of training.
        """


@final
class Magnitude(Importance):
    """The norm of all weights that write the unit and read it, those of norms included. Looks at no data."""

    def scores(self, rig: Rig, widths: Sequence[InnerWidth], batches: Iterable[Part]) -> list[Tensor]:
        state = rig.model.state_dict()

        def squares(width: InnerWidth) -> Tensor:
            weights = [each for each in width.slices() if each[0].endswith(".weight")]
            sums = [per_unit(over_others(state[name].double().square(), dim), places) for name, dim, places in weights]
            return torch.stack(sums).sum(0)

        return [squares(width).sqrt().cpu() for width in widths]


@final
class Wanda(Importance):
    """The absolute weights that read the unit, each times the norm of the activations that it multiplies: how much of
    the next layer's outputs comes from it."""

    @torch.no_grad()
    def scores(self, rig: Rig, widths: Sequence[InnerWidth], batches: Iterable[Part]) -> list[Tensor]:
        readers = [rig.model.get_submodule(width.layer) for width in widths]
        squares: dict[nn.Module, Tensor] = {}

        def note(reader: nn.Module, inputs: tuple[Any, ...]) -> None:
            (x,) = inputs
            of_part = over_others(x.float().square(), channel_dim(reader)).double()
            squares[reader] = squares[reader] + of_part if reader in squares else of_part

        hooks = [reader.register_forward_pre_hook(note) for reader in readers]
        try:
            for part in (part for batch in batches for part in rig.split(batch)):
                rig.forward(rig.move(part))
        finally:
            for hook in hooks:
                hook.remove()
        unseen = [width.layer for width, reader in zip(widths, readers, strict=True) if reader not in squares]
        if unseen:  # without activations all units of a width would be equal
            raise RuntimeError(f"wanda has seen no activations of {', '.join(unseen)}: the model didn't call its hooks")
        return [
            per_unit(over_others(weight_of(reader).double().abs(), dim) * squares[reader].sqrt(), places).cpu()
            for reader, (_, dim, places) in zip(readers, (width.reader for width in widths), strict=True)
        ]


@final
class Taylor(Importance):
    """How much the mean loss of a batch would change without the unit, to first order: the sum of weight times gradient
    over the weights that read it. Absolute, and the mean over the batches."""

    def scores(self, rig: Rig, widths: Sequence[InnerWidth], batches: Iterable[Part]) -> list[Tensor]:
        weights = [weight_of(rig.model.get_submodule(width.layer)) for width in widths]
        dims = [width.reader.dim for width in widths]
        each = [per_batch(rig, weights, dims, batch) for batch in batches]
        changes = [torch.stack(of_width) for of_width in zip(*each, strict=True)]  # (batches, columns) each
        return [
            torch.stack([per_unit(row, width.reader.places) for row in change]).abs().mean(0).cpu()
            for change, width in zip(changes, widths, strict=True)
        ]


def per_batch(rig: Rig, weights: Sequence[Tensor], dims: Sequence[int], batch: Part) -> list[Tensor]:
    """Of each weight its product with its gradient of the batch's mean loss, summed over all but one dimension."""
    parts = rig.split(batch)
    total, sums = rig.total(parts), [torch.zeros_like(weight) for weight in weights]
    for part in parts:
        moved = rig.move(part)
        loss = rig.criterion(rig.forward(moved), moved) / total
        for so_far, gradient in zip(sums, torch.autograd.grad(loss, list(weights)), strict=True):
            so_far += gradient
    products = [weight.detach().double() * so_far.double() for weight, so_far in zip(weights, sums, strict=True)]
    return [over_others(product, dim) for product, dim in zip(products, dims, strict=True)]


def over_others(tensor: Tensor, dim: int) -> Tensor:
    """The sum over all dimensions but one."""
    others = [other for other in range(tensor.dim()) if other != dim % tensor.dim()]
    return tensor.sum(others) if others else tensor


def per_unit(values: Tensor, places: Tensor) -> Tensor:
    """The sums over the places of each unit: (num_units, places of each) to (num_units,)."""
    return values[places.to(values.device)].sum(1)


def channel_dim(reader: nn.Module) -> int:
    """The dimension of a layer's inputs that its weight multiplies: 1 of images, which a convolution reads."""
    return 1 if weight_of(reader).dim() > 2 else -1


def weight_of(reader: nn.Module) -> Tensor:
    weight = reader.weight
    assert isinstance(weight, Tensor)
    return weight


IMPORTANCES: dict[ImportanceKind, Importance] = {
    ImportanceKind.magnitude: Magnitude(),
    ImportanceKind.wanda: Wanda(),
    ImportanceKind.taylor: Taylor(),
}
