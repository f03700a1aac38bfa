"""Muon: the update of a weight matrix is its orthogonalized momentum, so that all directions change equally.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). Updates are scaled to the size of
AdamW's, so that both share a learning rate, as in Liu et al., "Muon is Scalable for LLM Training" (2025). The update is
torch.optim's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lowvram.config.errors import require
from lowvram.core.copies import original
from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import Rig
from lowvram.knobs.optimizer.fp32_compute import PIECE_ELEMENTS, RoundingPolicy, keep_formats, with_fp32_compute
from lowvram.knobs.optimizer.groups import check_adam, check_rates, check_share, decayed


class Rule(Enum):
    """What updates a parameter."""

    MUON = "muon"
    ADAMW = "adamw"


Rules = MutableMapping[Any, Rule]  # by parameter


@dataclass(frozen=True)
class Muon(Knob):
    """One momentum per hidden matrix; AdamW for all other parameters.

    Hidden matrices are the weights of linear layers, except that of the head and those shared with an embedding. AdamW
    updates embeddings, the head, norms, biases and convolutions.
    """

    lr: float = 1e-3
    momentum: float = 0.95
    nesterov: bool = True
    iterations: int = 5
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    stage = Stage.OPTIMIZER

    def __post_init__(self) -> None:
        check_rates(self.lr, self.weight_decay)
        check_adam(self.beta1, self.beta2, self.eps)
        check_share("momentum", self.momentum)
        require(1 <= self.iterations < 100, "optimizer.iterations", self.iterations, "at least 1 and below 100")

    def reference(self) -> Muon:
        return self

    def apply(self, rig: Rig) -> Rig:
        rules = rules_of(rig.model, rig.task.head(rig.model))
        return replace(rig, make_optimizer=partial(self.make, rules=rules, policy=RoundingPolicy(rig.rounding)))

    def make(self, parameters: list[nn.Parameter], rules: Rules, policy: RoundingPolicy | None = None) -> Optimizer:
        """The optimizer of some of the model's parameters, or of copies that stand for them.

        Raises:
            KeyError: a parameter is neither one of the model nor a registered copy of one.
        """
        policy = policy or RoundingPolicy()
        matrices, others = (
            [parameter for parameter in parameters if rules[original(parameter)] is rule] for rule in Rule
        )
        optimizers: dict[Rule, Optimizer] = {}
        if matrices:
            optimizers[Rule.MUON] = with_fp32_compute(self.orthogonal(matrices), policy)
        if others:
            betas = (self.beta1, self.beta2)
            adamw = torch.optim.AdamW(decayed(others, self.weight_decay), self.lr, betas, self.eps, fused=True)
            optimizers[Rule.ADAMW] = with_fp32_compute(adamw, policy, piece_elements=PIECE_ELEMENTS)
        return ByRule(optimizers)

    def orthogonal(self, matrices: list[nn.Parameter]) -> Optimizer:
        return torch.optim.Muon(
            matrices,
            self.lr,
            self.weight_decay,
            self.momentum,
            self.nesterov,
            ns_steps=self.iterations,
            adjust_lr_fn="match_rms_adamw",
        )


def rules_of(model: nn.Module, head: nn.Linear | None) -> Rules:
    """What updates each parameter of a model."""
    modules = list(model.modules())
    rules: Rules = WeakIdKeyDictionary(dict.fromkeys(model.parameters(), Rule.ADAMW))
    for module in modules:
        if isinstance(module, nn.Linear):
            rules[module.weight] = Rule.MUON
    for module in modules:
        if isinstance(module, nn.Embedding) or module is head:
            rules[module.weight] = Rule.ADAMW
    return rules


@final
class ByRule(Optimizer):
    """Several optimizers as one, with one list of parameter groups and one state. Each group's "rule" names its
    optimizer."""

    def __init__(self, optimizers: Mapping[Rule, Optimizer]) -> None:
        groups = [{**group, "rule": rule.value} for rule, inner in optimizers.items() for group in inner.param_groups]
        super().__init__(groups, {})
        self.optimizers = optimizers

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for rule, inner in self.optimizers.items():
            inner.param_groups = [group for group in self.param_groups if group["rule"] == rule.value]
            inner.state = self.state
            inner.step()
            inner.param_groups, inner.state = [], defaultdict(dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        keep_formats(self, state_dict)
