"""What a rank does that has a run of each sample's tokens: it takes its own ones of a part, and tells the model where
they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from lowvram.compat.torch_fake import is_fake
from lowvram.compat.torch_trees import tree_leaves, tree_map_only
from lowvram.config.errors import Incompatible, require
from lowvram.core.mesh import Ranks
from lowvram.core.probes.runs import Told, positions_told
from lowvram.core.probes.token_trial import has_tokens
from lowvram.core.rig import Part, Rig, Task
from lowvram.knobs.sharding.attention import KEY, ProcessRow, Runs, attending

LOOKED_AT = (2, 64)  # samples and tokens for which a criterion is tried
BAND = 1e-4  # relative; the error of a loss that leaves one of so many tokens out is above it


def in_runs(rig: Rig, ranks: Ranks, told: Told | None) -> Rig:
    """The rig of a rank that has a run of the tokens of each of its samples.

    Args:
        ranks: of the row, which have the same samples.
        told: how the model is told where its tokens are; None: it needn't be.
    """
    runs = Runs(ProcessRow(ranks))

    def own(part: Part) -> Part:
        runs.num_tokens = num_tokens(part)
        require(runs.num_tokens >= ranks.size, KEY, ranks.size, f"at most the {runs.num_tokens} tokens of a sample")
        return cut(part, runs.num_tokens, runs.mine)

    def forward(part: Part) -> Any:
        if part.num_tokens is None:
            return rig.forward(part)
        runs.num_tokens = part.num_tokens
        with attending(rig.model, runs), positions_told(rig.model, told, runs.mine, part.device):
            return rig.forward(part)

    def run(final: Rig, parts: list[Part], total: Tensor) -> Tensor:
        with attending(rig.model, runs):
            return rig.run(final, parts, total)

    return with_tried_criterion(replace(rig, own=own, forward=forward, run=run), KEY)


def with_tried_criterion(rig: Rig, key: str) -> Rig:
    """The rig with a `TokenByToken`, unless its loss is known to be the sum of the tokens' losses."""
    if rig.structure.head is not None and type(rig.task).num_targets is Task.num_targets:
        return rig
    return replace(rig, criterion=TokenByToken(rig.criterion, rig.task, key))


def num_tokens(part: Part, key: str = KEY) -> int:
    """How many tokens the samples of a part have. Raises Incompatible where targets have none.

    Args:
        key: which shares them out, for messages.
    """
    sizes = {tuple(each.shape[1:2]) for each in tree_leaves(part.targets)}
    if len(sizes) > 1 or sizes == {()}:
        raise Incompatible(f"{key}: each token needs a target of its own: choose sharding=fsdp")
    return sizes.pop()[0]


def cut(part: Part, number: int, mine: slice) -> Part:
    """The part with a run of its `number` tokens. Raises Incompatible if no input has so many."""
    if not any(has_tokens(leaf, number) for leaf in tree_leaves(part.inputs)):
        raise Incompatible(f"{KEY}: the targets have {number} tokens, and no input has as many: choose sharding=fsdp")
    new = part.map(lambda tensor: tensor[:, mine].contiguous() if has_tokens(tensor, number) else tensor)
    return replace(new, num_tokens=number)


@final
class TokenByToken:
    """A criterion that, when it first has values, is tried with some tokens: at once, and in two runs.

    Args:
        key: which shares out tokens, for messages.

    Raises:
        Incompatible: when called, if the losses of the runs aren't together that of all.
    """

    def __init__(self, criterion: Callable[[Any, Part], Tensor], task: Task, key: str = KEY) -> None:
        self._criterion, self._task, self._key, self._is_tried = criterion, task, key, False

    def __call__(self, outputs: Any, part: Part) -> Tensor:
        loss = self._criterion(outputs, part)
        if part.num_tokens is not None and not self._is_tried and not is_fake(loss):
            self._try(outputs, part)
        return loss

    @torch.no_grad()
    def _try(self, outputs: Any, part: Part) -> None:
        num_samples, most = LOOKED_AT
        own = tree_leaves(part.targets)[0].shape[1]
        length = min(most, own)

        def taken(tree: Any, tokens: slice) -> Any:
            piece = lambda each: each[:num_samples, tokens] if has_tokens(each, own) else each[:num_samples]  # noqa: E731
            return tree_map_only(Tensor, piece, tree)

        def of(*tokens: int) -> tuple[float, int]:
            inputs, targets, found = (taken(each, slice(*tokens)) for each in (part.inputs, part.targets, outputs))
            piece = replace(part, inputs=inputs, targets=targets, soft=None)
            return float(self._criterion(found, piece)), int(self._task.num_targets(piece))

        whole, *runs = of(0, length), of(0, length // 2), of(length // 2, length)
        loss, number = (sum(each) for each in zip(*runs, strict=True))
        self._is_tried = whole[0] != 0
        if abs(loss - whole[0]) > BAND * abs(whole[0]) or number != whole[1]:
            raise Incompatible(
                f"{self._key}: the loss of a sample isn't the sum of its tokens' (of some tokens together"
                f" {whole[0]:.6g} for {whole[1]} targets, in two runs {loss:.6g} for {number}): choose sharding=fsdp"
            )
