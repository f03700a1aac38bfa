"""Whether a model whose layers are split computes the same where, between these, each rank has a run of each sample's
tokens: by trial, in one process, with random weights (core/probes/token_trial.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from lowvram.config.errors import Incompatible, require
from lowvram.core.probes.alone import are_close
from lowvram.core.probes.runs import positions_told, ways_to_tell
from lowvram.core.probes.splits import Splits
from lowvram.core.probes.token_trial import (
    ALL,
    Found,
    Samples,
    check_way,
    is_same_by_trial,
    length_of,
    length_of_trial,
)
from lowvram.core.structure import Blocks, Probe, Structure
from lowvram.knobs.sharding.find_runs import FEW, paths
from lowvram.knobs.sharding.find_splits import FindSplits
from lowvram.knobs.sharding.in_threads import Meeting, on_threads
from lowvram.knobs.sharding.own_tokens import KEY, split_with_own_tokens
from lowvram.knobs.sharding.runs_row import RunsRow, Way
from lowvram.knobs.sharding.split_trial import ThreadRow, parts_in


@final
@dataclass(frozen=True)
class FindOwnTokens(Probe[Way]):
    """How ranks can have a run of the tokens between layers that are split.

    Args:
        splits: how these are found.
    """

    splits: FindSplits

    def find(self, known: Structure) -> Way:
        """Raises Incompatible where the model would compute something else, or BadInput for too few tokens."""
        num_ranks = self.splits.num_ranks
        inputs = known.example(2)
        number = length_of(known, inputs, refused)
        require(
            number >= num_ranks, "sharding.tensor", num_ranks, f"at most the {number} tokens of a sample with {KEY}"
        )
        few = length_of_trial(known, number, FEW * num_ranks + number % num_ranks)
        splits = known.get(self.splits)
        for way in ways(known, inputs):
            compare = partial(is_same, splits=splits, num_ranks=num_ranks, way=way)
            if is_same_by_trial(known, inputs, number, few, compare):
                check_way(known, inputs, number, few, paths(known, number, 1, None), refused)
                return way
        raise refused("this model doesn't compute the same where ranks have a run of tokens between split layers")


def ways(known: Structure, inputs: Any) -> Iterator[Way]:
    """Those to be tried. Some models, such as GPT-2, give what their blocks have made the shape of the inputs."""
    yield Way(takes_all=True)
    yield from (Way(False, told) for told in ways_to_tell(known, inputs))


def refused(what: str) -> Incompatible:
    return Incompatible(f"{KEY}=true: {what}: choose {KEY}=false, or sharding=fsdp")


def is_same(samples: Samples, whole: Found, eps: float, splits: Splits, num_ranks: int, way: Way) -> bool:
    """Whether the ranks' outputs are side by side those of all tokens, and their gradients together: parts of those of
    weights that are split, and sums of all others."""
    blocks = samples.known.get(Blocks()).blocks

    def run(meeting: Meeting, rank: int) -> Found:
        row = RunsRow(ThreadRow(meeting, rank), way)
        row.num_tokens = samples.few
        mine = row.own_of(samples.few)
        split_so = partial(split_with_own_tokens, splits=splits, row=row, blocks=blocks)
        told = partial(positions_told, told=way.told, mine=mine, device=torch.device("cpu"))
        return samples.computed(mine, split_so, told, given=ALL if way.takes_all else mine)

    ranks, parted = on_threads(num_ranks, run), parts_in(samples.known.model, splits, num_ranks)
    pairs = list[tuple[Tensor, Tensor]]()
    for name, gradient in whole.gradients.items():
        found = [each.gradients[name] for each in ranks if name in each.gradients]
        join: Callable[[list[Tensor]], Tensor] = parted.get(name, lambda each: torch.stack([*each]).sum(0))
        pairs.append((join(found), gradient))
    if any(found.gradients.keys() - whole.gradients.keys() for found in ranks):
        return False
    join_inputs = (lambda each: torch.stack(each).sum(0)) if way.takes_all else (lambda each: torch.cat(each, 1))
    of_inputs = [join_inputs(each) for each in zip(*(found.of_inputs for found in ranks), strict=True)]
    outputs = [torch.cat(each, 1) for each in zip(*(found.outputs for found in ranks), strict=True)]
    return (
        are_close(outputs, whole.outputs, eps)
        and are_close(of_inputs, whole.of_inputs, eps)
        and are_close([one for one, _ in pairs], [other for _, other in pairs], eps)
    )
