"""What the teacher's blocks return, and how far the student's are from that, beside the loss of predictions.

Romero et al., "FitNets: Hints for Thin Deep Nets" (2015), and Jiao et al., "TinyBERT: Distilling BERT for Natural
Language Understanding" (2020), both with the squared difference. Here blocks are equally wide, so no layer has to learn
to map the student's width to the teacher's.

A block's outputs belong to a target (of texts whose tokens are predicted), or all to the sample. The loss of a target
is the mean of the squared differences of what belongs to it, and, over the blocks, the mean of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowvram.compat.torch_autograd import keeps_graph
from lowvram.core.rig import IGNORE, Part, Rig
from lowvram.data.spec import Modality
from lowvram.loops.distillation.matching import states_in

BY_TARGET = (Modality.TOKENS, Modality.MASKED_TOKENS)  # a block returns a row for each target of these data


@final
class Features:
    """The outputs of the teacher's blocks for one part, and the losses of those blocks of the student that have been
    compared with them.

    Args:
        states: the teacher's, by the number of the student's block.
        counts: of how many targets the loss each row of them counts: (samples,) or (samples, tokens).
    """

    def __init__(self, states: dict[int, Tensor], counts: Tensor) -> None:
        self.states, self.counts, self.num_blocks = states, counts, len(states)
        self.losses: list[Tensor] = []  # each the sum over the targets of the part (0-dim)

    def compare(self, number: int, of_student: Tensor) -> None:
        """Note the loss of a block, and forget what it was compared with."""
        if (of_teacher := self.states.pop(number, None)) is not None:  # of a block that is called again, the first call
            self.losses.append(FeatureLoss.apply(of_student, of_teacher, self.counts))  # pyright: ignore[reportArgumentType]

    def loss(self) -> Tensor:
        """The mean over the blocks of the sum over the targets (0-dim)."""
        if not self.losses:  # without it nobody would notice that nothing was compared
            raise RuntimeError("no block of the student was compared with the teacher's: the model called no hook")
        return torch.stack(self.losses).sum() / self.num_blocks


def counts_of(part: Part, modality: Modality) -> Tensor:
    """How many targets count of each row of a block's outputs: (samples, tokens), else (samples,)."""
    is_target = part.targets != IGNORE
    return is_target if modality in BY_TARGET or is_target.dim() == 1 else is_target.flatten(1).sum(1)


@final
class Watched:
    """Blocks of the teacher whose outputs are noted.

    Args:
        blocks: by the number of the student's block.
    """

    def __init__(self, blocks: Mapping[int, nn.Module]) -> None:
        self.states: dict[int, Tensor] = {}
        for number, block in blocks.items():
            block.register_forward_hook(partial(self.note, number))

    def note(self, number: int, block: nn.Module, inputs: Any, output: Any) -> None:
        if (states := states_in(output)) is not None:
            self.states.setdefault(number, states)

    def taken(self) -> dict[int, Tensor]:
        """What was noted since the last call; it isn't kept here."""
        states, self.states = self.states, {}
        return states


@final
class Compared:
    """Blocks of the student whose outputs are compared with `Features` of the part that is computed.

    The hooks stand outside of `block.forward`, so a recomputation of the block doesn't call them.
    """

    def __init__(self, blocks: Mapping[int, nn.Module]) -> None:
        self.features: Features | None = None  # of the running forward pass
        for number, block in blocks.items():
            block.register_forward_hook(torch.compiler.disable(partial(self.compare, number)))  # pyright: ignore[reportArgumentType]

    def compare(self, number: int, block: nn.Module, inputs: Any, output: Any) -> None:
        states = states_in(output)
        if self.features is not None and states is not None:
            self.features.compare(number, states)

    def forward(self, rig: Rig, part: Part) -> Any:
        """The forward pass of the student. Without soft targets, as in an evaluation, nothing is compared."""
        self.features = None if part.soft is None else part.soft.features
        try:
            return rig.forward(part)
        finally:
            self.features = None


@final
class FeatureLoss(torch.autograd.Function):
    """The sum over rows of their counts times the mean squared difference of the row (0-dim, at least fp32). Of a
    block's size only the difference is kept, and the gradient is computed in its place."""

    @staticmethod
    def forward(ctx: Any, of_student: Tensor, of_teacher: Tensor, counts: Tensor) -> Tensor:
        exact = torch.promote_types(of_student.dtype, torch.float32)
        difference = of_student.to(exact) - of_teacher
        of_each_row = tuple(range(counts.dim(), difference.dim()))
        num_elements = difference.numel() // counts.numel()
        loss = (torch.linalg.vector_norm(difference, dim=of_each_row).square() * counts).sum() / num_elements
        if ctx.needs_input_grad[0]:
            # Not in fp16, in which its product with the weight would be too small before the loss scale multiplies it.
            dtype = exact if of_student.dtype is torch.float16 else of_student.dtype
            difference *= counts.reshape(*counts.shape, *(1 for _ in of_each_row))
            ctx.save_for_backward(difference.to(dtype))
            ctx.dtype, ctx.factor = of_student.dtype, 2 / num_elements
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (difference,) = ctx.saved_tensors
        factor = loss_gradient * ctx.factor
        gradient = difference * factor if keeps_graph() else difference.mul_(factor)
        return gradient.to(ctx.dtype), None, None
