"""What the teacher's blocks return, and how far the student's are from that, beside the loss of predictions.

Romero et al., "FitNets: Hints for Thin Deep Nets" (2015), and Jiao et al., "TinyBERT: Distilling BERT for Natural
Language Understanding" (2020), both with the squared difference.

A block's outputs belong to a target (of texts whose tokens are predicted), or all to the sample. The loss of a target
is the mean of the squared differences of what belongs to it, and, over the blocks, the mean of that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowvram.compat.torch_autograd import keeps_graph
from lowvram.compress.distillation.matching import Call, Matches, states_in
from lowvram.compress.distillation.narrowing import Narrowing
from lowvram.core.rig import IGNORE, Part, Rig
from lowvram.data.spec import Modality

BY_TARGET = (Modality.TOKENS, Modality.MASKED_TOKENS)  # a block returns a row for each target of these data


@final
class Features:
    """The outputs of the teacher's blocks for one part, and the losses of the calls of the student's blocks that have
    been compared with them.

    Args:
        states: the teacher's, by the student's call.
        counts: of how many targets the loss each row of them counts: (samples,) or (samples, tokens).
    """

    def __init__(self, states: dict[Call, Tensor], counts: Tensor) -> None:
        self.states, self.counts, self.num_calls = states, counts, len(states)
        self.losses: list[Tensor] = []  # each the sum over the targets of the part (0-dim)

    def compare(self, call: Call, of_student: Tensor) -> None:
        """Note the loss of a call, and forget what it was compared with."""
        if (of_teacher := self.states.pop(call, None)) is not None:
            self.losses.append(FeatureLoss.apply(of_student, of_teacher, self.counts))  # pyright: ignore[reportArgumentType]

    def loss(self) -> Tensor:
        """The mean over the calls of the sum over the targets (0-dim)."""
        if not self.losses:  # without it nobody would notice that nothing was compared
            raise RuntimeError("no block of the student was compared with the teacher's: the model called no hook")
        return torch.stack(self.losses).sum() / self.num_calls


def counts_of(part: Part, modality: Modality) -> Tensor:
    """How many targets count of each row of a block's outputs: (samples, tokens), else (samples,)."""
    is_target = part.targets != IGNORE
    return is_target if modality in BY_TARGET or is_target.dim() == 1 else is_target.flatten(1).sum(1)


class Hooked(ABC):
    """Has `see` called with what blocks return.

    The hooks stand outside of `block.forward`, so a recomputation of the block doesn't call them.

    Args:
        blocks: all of the model.
        calls: those of interest.
    """

    def __init__(self, blocks: Sequence[nn.Module], calls: Iterable[Call]) -> None:
        self.turns = Counter[int]()  # calls of each block in the running forward pass
        for number in sorted({call.block for call in calls}):
            blocks[number].register_forward_hook(torch.compiler.disable(partial(self.count, number)))  # pyright: ignore[reportArgumentType]

    def count(self, number: int, block: nn.Module, inputs: Any, output: Any) -> None:
        call = Call(number, self.turns[number])
        self.turns[number] += 1
        if (states := states_in(output)) is not None:
            self.see(call, states)

    @abstractmethod
    def see(self, call: Call, states: Tensor) -> None: ...


@final
class Watched(Hooked):
    """The teacher's blocks, whose outputs are noted, in the width of the student's."""

    def __init__(self, blocks: Sequence[nn.Module], matches: Matches, narrowing: Narrowing) -> None:
        super().__init__(blocks, (partner.call for partner in matches.values()))
        self.matches, self.narrowing, self.states = matches, narrowing, dict[Call, Tensor]()

    def see(self, call: Call, states: Tensor) -> None:
        partners = {ours: partner for ours, partner in self.matches.items() if partner.call == call}
        narrowed = {partner: self.narrowing(states, partner) for partner in set(partners.values())}
        self.states |= {ours: narrowed[partner] for ours, partner in partners.items()}

    def taken(self) -> dict[Call, Tensor]:
        """What a forward pass has returned, by the student's calls; it isn't kept here."""
        states, self.states = self.states, {}
        self.turns.clear()
        return states


@final
class Compared(Hooked):
    """The student's blocks, whose outputs are compared with `Features` of the part that is computed."""

    features: Features | None = None  # of the running forward pass

    def see(self, call: Call, states: Tensor) -> None:
        if self.features is not None:
            self.features.compare(call, states)

    def forward(self, rig: Rig, part: Part) -> Any:
        """The forward pass of the student. Without soft targets, as in an evaluation, nothing is compared."""
        self.features = None if part.soft is None else part.soft.features
        self.turns.clear()
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
