"""Muon: the step of a weight matrix is its momentum made orthogonal, so that all its directions learn alike.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); steps as large as AdamW's, so that both
share a learning rate, as in Liu et al., "Muon is Scalable for LLM Training" (2025). The update is torch.optim's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from lowvram.config import require
from lowvram.core.copies import original
from lowvram.core.knob import Fact, Knob, Stage
from lowvram.core.rig import Rig
from lowvram.knobs.optimizer.groups import check_adam, check_rates, check_share, decayed
from lowvram.knobs.optimizer.widened import PIECE_ELEMENTS, Rounding, keep_formats, widened


@dataclass(frozen=True)
class Muon(Knob):
    """One momentum per hidden matrix; AdamW for all other parameters.

    Hidden matrices are the weights of linear layers, but not those of the head nor what an embedding shares. Embeddings,
    the head, norms, biases and convolutions are AdamW's.
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

    def needs(self) -> frozenset[Fact]:
        return frozenset({Fact.WHOLE_PARAMS})

    def apply(self, rig: Rig) -> Rig:
        hidden = hidden_matrices(rig.model, rig.task.head(rig.model))
        return replace(rig, make_optimizer=partial(self.make, hidden=hidden, rounding=rig.rounding))

    def make(
        self, parameters: list[nn.Parameter], hidden: WeakIdKeyDictionary, rounding: Rounding | None = None
    ) -> torch.optim.Optimizer:
        """The optimizer of some parameters, or of copies that stand for them; `hidden` holds the matrices."""
        matrices = [parameter for parameter in parameters if original(parameter) in hidden]
        others = [parameter for parameter in parameters if original(parameter) not in hidden]
        rules: dict[str, torch.optim.Optimizer] = {}
        if matrices:
            rules["muon"] = widened(self.orthogonal(matrices), rounding)
        if others:
            betas = (self.beta1, self.beta2)
            adamw = torch.optim.AdamW(decayed(others, self.weight_decay), self.lr, betas, self.eps, fused=True)
            rules["adamw"] = widened(adamw, rounding, piece_elements=PIECE_ELEMENTS)
        return ByRule(rules)

    def orthogonal(self, matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon(
            matrices,
            self.lr,
            self.weight_decay,
            self.momentum,
            self.nesterov,
            ns_steps=self.iterations,
            adjust_lr_fn="match_rms_adamw",
        )


def hidden_matrices(model: nn.Module, head: nn.Linear | None) -> WeakIdKeyDictionary:
    """The weights of linear layers that neither read nor write a vocabulary, as keys."""
    modules = list(model.modules())
    ends = [module.weight for module in modules if isinstance(module, nn.Embedding)]
    ends += [] if head is None else [head.weight]
    linear = [module.weight for module in modules if isinstance(module, nn.Linear)]
    found = WeakIdKeyDictionary()
    for weight in linear:
        if weight.requires_grad and not any(weight is end for end in ends):
            found[weight] = None
    return found


@final
class ByRule(torch.optim.Optimizer):
    """Several optimizers as one: one list of groups, one state. Each group names the rule that updates it."""

    def __init__(self, rules: Mapping[str, torch.optim.Optimizer]) -> None:
        groups = [{**group, "rule": name} for name, rule in rules.items() for group in rule.param_groups]
        super().__init__(groups, {})
        self.rules = rules

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for name, rule in self.rules.items():
            rule.param_groups = [group for group in self.param_groups if group["rule"] == name]
            rule.state = self.state
            rule.step()
            rule.param_groups, rule.state = [], defaultdict(dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        keep_formats(self, state_dict)
