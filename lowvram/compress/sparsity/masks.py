"""Masks of weights, and the hooks that keep masked weights at zero, whatever the optimizer and the stepper.

1. When autograd has computed a gradient, its masked elements become 0, so that norms and clipping leave them out. Only
   in steps in which a rule needs them (`Rule.needs_gradients`) they count there, and become 0 before the update.
2. Before an optimizer updates a weight, its gradient is that of the whole step: summed over parts and ranks, without a
   loss scale. There a `Rule` may change the mask. Steps that a loss scale skips never get there.
3. After the update masked weights become 0, and so do their moments if the mask is new.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowvram.compat.torch_autograd import version_of
from lowvram.compat.torch_modes import is_traceable_wrapper_subclass
from lowvram.config.errors import Incompatible
from lowvram.core import host
from lowvram.core.copies import original
from lowvram.core.hooks import when_accumulated
from lowvram.core.kind import Kind
from lowvram.core.layers import is_transposed
from lowvram.core.ledger import announce
from lowvram.core.rig import MakeOptimizer, Rig
from lowvram.core.rounding import CORRECTION
from lowvram.core.stepper import GradientSink, Stepper, StepperAround, Update

VISIBLE = 1e-3  # a smaller difference of shares isn't told: `share` is met to the unit


@final
class Mask:
    """Which elements of one weight are kept at 0: those where `masked` is true (bool, in the weight's layout)."""

    def __init__(self, name: str, layer: Any) -> None:
        self.name, self.inputs = name, inputs_of(layer)
        self.weight: nn.Parameter = layer.weight
        self.masked = announce(torch.zeros_like(self.weight, dtype=torch.bool, requires_grad=False), Kind.OPTIMIZER)
        self.is_new = False  # since the last update of the weight
        self._in_host, self._copied = None, -1  # for weights that are updated there; the version of `masked` it is of

    def change(self, masked: Tensor) -> None:
        self.masked.copy_(masked)
        self.is_new = True

    def clear(self, values: Tensor) -> None:
        """Set the masked elements of a tensor of the weight's shape to 0."""
        values.masked_fill_(self.beside(values), 0)

    def beside(self, values: Tensor) -> Tensor:
        """`masked` where some values are. In host memory it is a copy, written only where the mask has changed, since
        that waits for the device."""
        if values.device == self.masked.device and not host.holds(values):
            return self.masked
        if self._in_host is None:
            self._in_host = host.empty_like(self.masked, pin=False)
        if self._copied != version_of(self.masked):
            self._in_host.copy_(self.masked)
            self._copied = version_of(self.masked)
        return self._in_host

    def announce_copy(self) -> None:
        """To ledgers, which see it in no state."""
        if self._in_host is not None:
            announce(self._in_host, Kind.HOST)

    def clear_state(self, state: dict[str, Any]) -> None:
        """After an update: the same for what an optimizer keeps of each element. A correction, which is a part of the
        weight, every time; moments stay at 0 by themselves, since their gradients are 0."""
        for name, value in state.items():
            if isinstance(value, Tensor) and (self.is_new or name == CORRECTION):
                self.clear_moment(value)
        self.is_new = False

    def clear_moment(self, moment: Tensor) -> None:
        if is_traceable_wrapper_subclass(moment):
            self.clear_codes(moment)
        elif moment.shape == self.masked.shape:
            self.clear(moment)

    def clear_codes(self, moment: Any) -> None:
        """The same for a moment that torchao keeps in few bits, of a weight in channels_last in the order in memory."""
        masked = self.beside(moment)
        masked = masked if moment.shape == masked.shape else contiguous(masked)
        moment.copy_(moment.dequantize().masked_fill_(masked, 0))


def inputs_of(layer: nn.Module) -> int:
    """The dimension of a layer's weight that counts its inputs."""
    return 0 if is_transposed(layer) else 1


def contiguous(tensor: Tensor) -> Tensor:
    """A view whose dimensions are in the order in memory."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


class Rule(ABC):
    """How masks change. Each method sees `step`, the number of the step, from 0."""

    def __init__(self, masks: Sequence[Mask]) -> None:
        self.masks = masks

    def start(self, seed: int) -> None:
        """Make the first masks: none. Called before the first step, also of a resumed run."""
        del seed

    def begin(self, step: int) -> None:
        """Called before the forward pass, when all weights are those of the last update. New masks take effect in the
        update of this step."""
        del step

    def needs_gradients(self, step: int) -> bool:
        """Whether `update` in this step needs the gradients of masked weights too."""
        return False

    def update(self, mask: Mask, weight: Tensor, gradient: Tensor, step: int) -> None:
        """Called before a weight, or its copy in host memory, is updated with its gradient."""
        del mask, weight, gradient, step

    def state_dict(self) -> dict[str, Any]:
        """What further masks depend on, besides weights, gradients, masks and steps."""
        return {}

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""


@final
class Masking:
    """The masks of a rig, with the hooks that apply them.

    Args:
        final_share: the share of the weights with masks that is to be masked at the end.
    """

    def __init__(self, masks: Sequence[Mask], rule: Rule, final_share: float) -> None:
        self.masks, self.rule, self.final_share = {mask.weight: mask for mask in masks}, rule, final_share
        self.step = 0  # of the run; counts steps without an update, too
        self.is_heeded = False  # by an optimizer
        for weight in self.masks:  # before a stepper's hooks, which may use the gradient and free it
            when_accumulated(weight, self.arrived)

    def around(self, make: MakeOptimizer) -> MakeOptimizer:
        """`make`, whose optimizers keep to the masks."""

        def make_masked(parameters: list[nn.Parameter]) -> Optimizer:
            optimizer = make(parameters)
            optimizer.register_step_pre_hook(self.before_update)
            optimizer.register_step_post_hook(self.after_update)
            self.is_heeded = True
            return optimizer

        return make_masked

    def start(self, rig: Rig, seed: int) -> Rig:
        """The rig whose stepper keeps the masks from step to step. Raises Incompatible if no optimizer heeds them."""
        if not self.is_heeded:  # another knob has replaced `make_optimizer`
            raise Incompatible("sparsity acts around the optimizer: name sparsity after it in the knobs of `assemble`")
        self.rule.start(seed)
        for weight, mask in self.masks.items():
            mask.clear(weight.detach())
        return replace(rig, stepper=MaskingStepper(rig.stepper, self))

    @torch.no_grad()
    def arrived(self, weight: nn.Parameter) -> None:
        if weight.grad is not None and not self.rule.needs_gradients(self.step):
            self.masks[weight].clear(weight.grad)

    @torch.no_grad()
    def before_update(self, optimizer: Optimizer, *_: Any) -> None:
        for parameter, mask in self.masked_in(optimizer):
            if parameter.grad is not None:
                self.rule.update(mask, parameter.detach(), parameter.grad, self.step)
                if self.rule.needs_gradients(self.step):
                    mask.clear(parameter.grad)

    @torch.no_grad()
    def after_update(self, optimizer: Optimizer, *_: Any) -> None:
        for parameter, mask in self.masked_in(optimizer):
            mask.clear(parameter.detach())
            mask.clear_state(optimizer.state.get(parameter, {}))

    def masked_in(self, optimizer: Optimizer) -> Iterator[tuple[Tensor, Mask]]:
        """The weights of an optimizer that have masks, or their copies."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (mask := self.masks.get(original(parameter))) is not None:  # pyright: ignore[reportArgumentType]
                    yield parameter, mask


def share_of_others(tensors: Sequence[Tensor]) -> float:
    """The share of elements that aren't 0, or aren't false."""
    return sum(int(tensor.count_nonzero()) for tensor in tensors) / sum(map(Tensor.numel, tensors))


@final
class MaskingStepper(StepperAround):
    """Counts the steps for the masks, saves them with the inner stepper's state, and tells what has become of them."""

    def __init__(self, inner: Stepper, masking: Masking) -> None:
        super().__init__(inner)
        self.masking = masking

    @torch.no_grad()
    def begin(self, num_parts: int, divisor: Tensor | float = 1.0) -> None:
        for mask in self.masking.masks.values():
            mask.announce_copy()
        self.masking.rule.begin(self.masking.step)
        self.inner.begin(num_parts, divisor)

    def sink_of(self, parameter: Tensor) -> GradientSink | None:
        """None for a weight with a mask, which applies to its whole gradient."""
        return None if parameter in self.masking.masks else self.inner.sink_of(parameter)

    def update(self) -> Update:
        update = self.inner.update()
        self.masking.step += 1
        return update

    def figures(self) -> Mapping[str, float]:
        """`share_of_zeros`: of the weights that have masks, which share is exactly 0."""
        weights = [weight.detach() for weight in self.masking.masks]
        return {**self.inner.figures(), "model.share_of_zeros": 1 - share_of_others(weights)}

    def remark(self) -> str | None:
        share, wanted = share_of_others([mask.masked for mask in self.masking.masks.values()]), self.masking.final_share
        if abs(share - wanted) < VISIBLE:
            return self.inner.remark()
        why = "the run was resumed with other steps or shares, and masks once set stay"
        return f"{share:.4g} of them are masked at the end, not {wanted:.4g}: {why}"

    def state_dict(self) -> dict[str, Any]:
        masks = self.masking.masks.values()
        return {
            "inner": self.inner.state_dict(),
            "step": self.masking.step,
            "masked": {mask.name: mask.masked for mask in masks},
            "is_new": {mask.name: mask.is_new for mask in masks},
            "rule": self.masking.rule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.masking.step = state["step"]
        for mask in self.masking.masks.values():
            mask.masked.copy_(state["masked"][mask.name])
            mask.is_new = state["is_new"][mask.name]
        self.masking.rule.load_state_dict(state["rule"])
