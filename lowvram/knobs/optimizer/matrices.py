"""What optimizers have in common that update the matrices of a model's layers by a rule of their own, and all other
parameters as AdamW does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lowvram.core.copies import original
from lowvram.core.layers import is_transposed, owns_weight
from lowvram.core.rig import MakeOptimizer, Rig
from lowvram.core.structure import known_last_weights
from lowvram.knobs.optimizer.fp32_compute import PIECE_ELEMENTS, RoundingPolicy, keep_formats, with_fp32_compute
from lowvram.knobs.optimizer.groups import AdamKnob
from lowvram.knobs.optimizer.state_formats import StateFormat

LINEAR_AND_CONVOLUTIONS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
OTHERS = "adamw"  # the rule of all parameters that are no matrices


class Role(NamedTuple):
    """What an optimizer of matrices must know of a parameter."""

    number: int  # its place in the model's list of parameters
    is_matrix: bool


Roles = MutableMapping[Any, Role]  # by parameter


@dataclass(frozen=True)
class MatrixKnob(AdamKnob, ABC):
    """A rule for matrices; AdamW for embeddings, the head, norms, biases and whatever else is in no layer of
    `layers`."""

    rule: ClassVar[str]  # the name of the rule, in saved states
    layers: ClassVar[tuple[type[Any], ...]]  # the modules whose weights are matrices
    formats: ClassVar[Mapping[str, StateFormat] | None] = None  # of states: how they are kept between steps

    def maker(self, rig: Rig) -> MakeOptimizer:
        roles = roles_of(rig.model, known_last_weights(rig.structure, f"optimizer={self.rule}"), self.layers)
        return partial(self.make, roles=roles, policy=RoundingPolicy(rig.rounding))

    def make(self, parameters: list[nn.Parameter], roles: Roles, policy: RoundingPolicy | None = None) -> Optimizer:
        """The optimizer of some of the model's parameters, or of copies that stand for them.

        Raises:
            KeyError: a parameter is neither one of the model nor a registered copy of one.
        """
        policy = policy or RoundingPolicy()
        role_of = {parameter: roles[original(parameter)] for parameter in parameters}
        matrices = {parameter: role.number for parameter, role in role_of.items() if role.is_matrix}
        others = [parameter for parameter, role in role_of.items() if not role.is_matrix]
        optimizers: dict[str, Optimizer] = {}
        if matrices:
            optimizers[self.rule] = with_fp32_compute(self.of_matrices(matrices), policy, self.formats)
        if others:
            optimizers[OTHERS] = with_fp32_compute(self.adamw(others), policy, self.formats, PIECE_ELEMENTS)
        return ByRule(optimizers)

    def adam_fields(self) -> dict[str, Any]:
        """The fields of AdamW, as torch's optimizers name them."""
        betas = (self.beta1, self.beta2)
        return {"lr": self.lr, "weight_decay": self.weight_decay, "betas": betas, "eps": self.eps}

    @abstractmethod
    def of_matrices(self, matrices: Mapping[nn.Parameter, int]) -> Optimizer:
        """The optimizer of the matrices, each of which has the number of its role."""


def roles_of(model: nn.Module, last: Collection[Tensor], layers: tuple[type[nn.Module], ...]) -> Roles:
    """The roles of a model's parameters. Matrices are the weights of `layers`, and of linear layers of other libraries,
    except those of the last layers and those shared with an embedding."""
    modules: list[Any] = [module for module in model.modules() if owns_weight(module)]
    matrices = {module.weight for module in modules if isinstance(module, layers) or is_transposed(module)}
    matrices -= {*last, *(module.weight for module in modules if isinstance(module, nn.Embedding))}
    return WeakIdKeyDictionary(
        {
            each: Role(number, each in matrices and not each.is_complex())
            for number, each in enumerate(model.parameters())
        }
    )


def as_matrix(tensor: Tensor) -> Tensor:
    """(out, everything else): a convolution's (out, in, k, k) as (out, in * k * k)."""
    return tensor.flatten(1)


@final
class ByRule(Optimizer):
    """Several optimizers as one, with one list of parameter groups and one state. Each group's "rule" names its
    optimizer."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        groups = [{**group, "rule": rule} for rule, inner in optimizers.items() for group in inner.param_groups]
        super().__init__(groups, {})
        self.optimizers = optimizers

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for rule, inner in self.optimizers.items():
            inner.param_groups = [group for group in self.param_groups if group["rule"] == rule]
            inner.state = self.state
            inner.step()
            inner.param_groups, inner.state = [], defaultdict(dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        keep_formats(self, state_dict)


class PerParameterOptimizer(Optimizer, ABC):
    """Updates each parameter by itself.

    Args:
        groups: parameter groups, or parameters.
        fields: the values of each group that doesn't have them.
    """

    def __init__(self, groups: Any, **fields: Any) -> None:
        super().__init__(groups, fields)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    self.update(parameter, parameter.grad, self.state[parameter], group)

    @abstractmethod
    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update a weight, which has decayed already, and its state in place; keep the gradient as it is."""


def numbered(matrices: Mapping[nn.Parameter, int]) -> list[dict[str, Any]]:
    """A parameter group for each matrix, with its "number"."""
    return [{"params": [matrix], "number": number} for matrix, number in matrices.items()]
