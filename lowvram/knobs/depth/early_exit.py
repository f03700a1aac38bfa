"""depth=early_exit: the head also reads earlier blocks, and an evaluation may stop there.

Teerapittayanon, McDanel and Kung, "BranchyNet: Fast Inference via Early Exiting from Deep Neural Networks" (2016). Here
all exits share the model's own head, as in Elbayad et al., "Depth-Adaptive Transformer" (2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import Signature, signature
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.config.errors import require
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.knob import Exactness, Knob, Stage
from lowvram.core.probes.stated import TAIL, Tail
from lowvram.core.rig import IGNORE, Part, Rig
from lowvram.core.structure import BLOCKS, HEAD, Blocks, Structure, unless
from lowvram.knobs.depth.same_shape import LEAVE_DEPTH


def has_exits(known: Structure) -> bool:
    tail = known.get(TAIL)
    return tail is not None and len(tail.blocks) > 1


EXITS = ModelFact("the head takes the output of an earlier block, too", unless(has_exits, LEAVE_DEPTH))


@final
@dataclass(frozen=True)
class EarlyExit(Knob):
    """In training the loss of each exit counts `weight` times beside that of the whole model. An evaluation also tells
    what the model would answer if each target took the first exit whose most likely class has at least the probability
    `threshold`."""

    exits: list[int] | None = None
    weight: float = 0.3
    threshold: float = 0.9

    stage = Stage.BUILD
    exactness = Exactness.LOSSY
    band = 1e-5
    decides_learning = True
    needs_always = frozenset({BLOCKS, HEAD, EXITS, Fact.FULL_LOGITS})
    breaks_always = frozenset({Fact.CHAINED_BLOCKS})

    def __post_init__(self) -> None:
        numbers = self.exits
        is_list = numbers is None or (bool(numbers) and min(numbers) >= 0 and numbers == sorted(set(numbers)))
        allowed = "null (the middle one) or a list of at least one number of a block, counted from 0 and rising"
        require(is_list, "depth.exits", self.exits, allowed)
        require(0 <= self.weight < torch.inf, "depth.weight", self.weight, "at least 0")
        require(0 <= self.threshold <= 1, "depth.threshold", self.threshold, "a probability, between 0 and 1")

    def caveat(self, model: nn.Module) -> str:
        num = "one earlier exit" if self.exits is None or len(self.exits) == 1 else f"{len(self.exits)} earlier exits"
        return f"the loss of {num} counts {self.weight:g} times beside that of the whole model"

    def apply(self, rig: Rig) -> Rig:
        known, tail = rig.structure, rig.structure.get(TAIL)
        assert tail is not None  # EXITS
        names = known.get(Blocks()).blocks
        exits = Exits(rig.model, tail, self.checked(known, tail), len(names), self.threshold)

        def criterion(outputs: Any, part: Part) -> Tensor:
            if isinstance(outputs, Tensor):  # of an evaluation
                return rig.criterion(outputs, part)
            whole, *earlier = [rig.criterion(each, part) for each in outputs]
            return whole + self.weight * torch.stack(earlier).sum()

        means = {
            "loss_early": lambda part: rig.criterion(exits.early, part),
            "accuracy_early": lambda part: (exits.early.argmax(-1) == part.targets).sum(),
            "blocks_used": lambda part: exits.share_used[part.targets != IGNORE].sum(),
        }
        return replace(rig, criterion=criterion, eval_means={**rig.eval_means, **means})

    def checked(self, known: Structure, tail: Tail) -> dict[int, nn.Module]:
        """The blocks after which there is an exit, by their numbers. Raises BadInput if the head can't follow one."""
        fitting = [number for number, name in enumerate(known.get(Blocks()).blocks) if name in tail.blocks[:-1]]
        numbers = fitting[len(fitting) // 2 :][:1] if self.exits is None else self.exits
        allowed = f"numbers of blocks that are as wide as the last one, and before it: of this model some of {fitting}"
        require(set(numbers) <= set(fitting), "depth.exits", numbers, allowed)
        return {number: known.blocks[number] for number in numbers}


@final
class Exits:
    """The forward pass of a model with exits. In training it returns the logits of the whole model and of each exit, in
    an evaluation those of the whole model.

    Attributes:
        early: after an evaluation's forward pass: of each target the logits of the exit that it took.
        share_used: and the share of the blocks before that.
    """

    early: Tensor
    share_used: Tensor

    def __init__(
        self, model: nn.Module, tail: Tail, exits: dict[int, nn.Module], num_blocks: int, threshold: float
    ) -> None:
        self.model, self.call, self.threshold = model, model.forward, threshold
        self.to_logits = getattr(model, tail.method)
        self.shares = [(number + 1) / num_blocks for number in exits]
        self.states: dict[int, Tensor] = {}  # by the block's number, during a forward pass
        for number, block in exits.items():
            block.register_forward_hook(partial(self.note, number))
        model.forward = self

    @property
    def __signature__(self) -> Signature:
        return signature(self.call)

    def note(self, number: int, _: nn.Module, inputs: Any, output: Tensor) -> None:
        self.states[number] = output

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        whole = self.call(*inputs, **named)
        earlier = [self.to_logits(state) for _, state in sorted(self.states.items())]
        self.states.clear()
        if self.model.training:
            return (whole, *earlier)
        self.early, self.share_used = first_sure([*earlier, whole], [*self.shares, 1.0], self.threshold)
        return whole


def first_sure(logits: Sequence[Tensor], shares: Sequence[float], threshold: float) -> tuple[Tensor, Tensor]:
    """Of each target the first logits that are sure, else the last ones; and the share of the same place.

    Args:
        logits: (..., classes) each.
    """
    chosen, share = logits[-1], torch.full(logits[-1].shape[:-1], shares[-1], device=logits[-1].device)
    for each, its_share in reversed(list(zip(logits[:-1], shares[:-1], strict=True))):
        is_sure = each.float().softmax(-1).amax(-1) >= threshold
        chosen = each.where(is_sure[..., None], chosen)
        share = share.masked_fill(is_sure, its_share)
    return chosen, share
