"""optimizer=external: any torch.optim.Optimizer that the user names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING
from torch import nn
from torch.optim import Optimizer

from lowvram.config.errors import BadInput, Incompatible, require
from lowvram.config.importing import check_args, import_object
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.knob import Exactness
from lowvram.core.rates import note_rates
from lowvram.core.rig import MakeOptimizer, Rig
from lowvram.core.untouched import marking
from lowvram.knobs.optimizer.fp32_compute import PIECE_ELEMENTS, RoundingPolicy, with_fp32_compute
from lowvram.knobs.optimizer.groups import OptimizerKnob, check_rates, decayed
from lowvram.knobs.optimizer.trial import Traits, Unsavable, traits_of

TRAITS: dict[str, Traits] = {}  # by the knob's fields, as text


@dataclass(frozen=True)
class External(OptimizerKnob):
    """The class of an optimizer, or a function that makes one. Whether it may be given single parameters or parts of
    them is found by trying it on small tensors.

    Raises:
        BadInput: there is no such class, its arguments don't fit, or it can't update tensors without a closure.
    """

    target: str = MISSING
    lr: float = 1e-3
    args: dict[str, Any] | None = None

    exactness = Exactness.LOSSY

    def __post_init__(self) -> None:
        super().__post_init__()
        decay = (self.args or {}).get("weight_decay", 0.0)
        is_fit = isinstance(decay, int | float) and decay >= 0
        require(is_fit, "optimizer.args.weight_decay", decay, "a number of at least 0")
        check_rates(self.lr, decay)
        maker = import_object(self.target, "optimizer.target")
        check_args(maker, self.target, {"params": [], "lr": self.lr, **(self.args or {})}, "optimizer.args")
        _ = self.traits

    @property
    def traits(self) -> Traits:
        if repr(self) not in TRAITS:
            try:
                TRAITS[repr(self)] = traits_of(self.plain)
            except Exception as error:
                if isinstance(error, BadInput):
                    raise
                allowed = f"an optimizer that updates dense tensors without a closure: {type(error).__name__}: {error}"
                if isinstance(error, Unsavable):
                    allowed = f"an optimizer whose state a snapshot can hold: {error}"
                raise BadInput("optimizer.target", self.target, allowed) from None
        return TRAITS[repr(self)]

    def needs(self) -> frozenset[Fact | ModelFact]:
        return super().needs() | (frozenset() if self.traits.is_elementwise else frozenset({Fact.WHOLE_UPDATES}))

    def breaks(self) -> frozenset[Fact]:
        return frozenset() if self.traits.is_per_parameter else frozenset({Fact.SEPARATE_UPDATES})

    def maker(self, rig: Rig) -> MakeOptimizer:
        if self.has_rules and (self.traits.sets_lr or self.traits.changes_groups):
            raise Incompatible(
                f"optimizer.target={self.target} changes its groups of parameters itself, or doesn't read their rates,"
                " so weights can't have rates of their own: leave optimizer.groups and optimizer.layer_decay null, or"
                " choose another optimizer"
            )
        return super().maker(rig)

    def make(self, parameters: list[nn.Parameter], policy: RoundingPolicy) -> Optimizer:
        piece_elements = PIECE_ELEMENTS if self.traits.is_elementwise else None
        plain = self.plain(parameters)
        optimizer = with_fp32_compute(plain, policy, piece_elements=piece_elements)
        if optimizer is not plain and not self.traits.has_stand_ins:
            raise Incompatible(
                f"optimizer.target={self.target} can't be given one weight after the other, as precision=bf16_pure,"
                " precision=bf16_split and offload=parameters do: it keeps counts or averages outside of `state` and"
                " `param_groups`. Choose precision=fp32 or precision=bf16, and offload=none"
            )
        note_rates(optimizer, self.lr, self.traits.sets_lr)
        return marking(optimizer)

    def plain(self, parameters: list[nn.Parameter]) -> Optimizer:
        """The optimizer itself. As everywhere here, a weight decay leaves out biases and norms."""
        args: Mapping[str, Any] = self.args or {}
        groups = decayed(parameters, args["weight_decay"]) if "weight_decay" in args else parameters
        optimizer = import_object(self.target, "optimizer.target")(groups, lr=self.lr, **args)
        allowed = f"a class of torch.optim.Optimizer: this made a {type(optimizer).__name__}"
        require(isinstance(optimizer, Optimizer), "optimizer.target", self.target, allowed)
        return optimizer
