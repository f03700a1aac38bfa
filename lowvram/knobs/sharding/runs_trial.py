"""The trial of find_runs.py: a model's samples at once, and in runs of tokens, each in a thread of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_trees import tree_flatten, tree_unflatten
from lowvram.core.attention import replacing_attention
from lowvram.core.probes.alone import are_close
from lowvram.core.probes.runs import Told, positions_told
from lowvram.core.probes.token_trial import Found, Path, Samples, Seen, first_of, has_tokens
from lowvram.core.structure import Structure
from lowvram.knobs.sharding.attention import Row, Runs, attending_in_thread, attention
from lowvram.knobs.sharding.in_threads import Meeting, on_threads


def is_same_in_runs(samples: Samples, whole: Found, eps: float, num_ranks: int, told: Told | None) -> bool:
    """Whether the outputs of ranks that have a run each are side by side those of all tokens, and their gradients
    together."""
    ranks = in_threads(samples, num_ranks, told)
    gradients = {name: torch.zeros_like(each) for name, each in whole.gradients.items()}
    for found in ranks:
        if not found.gradients.keys() <= gradients.keys():
            return False
        for name, each in found.gradients.items():
            gradients[name] += each
    outputs, of_inputs = (
        [torch.cat(each, 1) for each in zip(*of_ranks, strict=True)]
        for of_ranks in ([found.outputs for found in ranks], [found.of_inputs for found in ranks])
    )
    pairs = [(outputs, whole.outputs), (of_inputs, whole.of_inputs)]
    # Gradients all at once: that of a bias of keys, for example, is nothing but rounding.
    pairs.append(([*gradients.values()], [*whole.gradients.values()]))
    return all(are_close(one, other, eps) for one, other in pairs)


def in_threads(samples: Samples, num_ranks: int, told: Told | None) -> list[Found]:
    """What each rank computes, all at the same time."""

    def run(meeting: Meeting, rank: int) -> Found:
        runs = Runs(ThreadRow(meeting, rank))
        runs.num_tokens = samples.few
        return samples.computed(runs.mine, around=lambda copy: in_run(copy, runs, told))

    with replacing_attention(samples.known.model, attention):
        return on_threads(num_ranks, run)


@contextmanager
def in_run(copy: nn.Module, runs: Runs, told: Told | None) -> Iterator[None]:
    """Inside it a copy computes a rank's run in the thread that stands for the rank."""
    with attending_in_thread(runs), positions_told(copy, told, runs.mine, torch.device("cpu")):
        yield


@final
class ThreadRow(Row):
    """A thread among those of a row."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._meeting.size

    def exchange(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        return torch.cat(self._meeting.exchange(self._rank, x.detach().split(list(sends))))


@final
class LastAlone(Row):
    """The last rank of a row whose others aren't there: what they send has a size, and no values."""

    def __init__(self, size: int) -> None:
        self._size = size

    @property
    def rank(self) -> int:
        return self._size - 1

    @property
    def size(self) -> int:
        return self._size

    def exchange(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        return x.new_empty((sum(receives), *x.shape[1:]))


def path_of(
    known: Structure, copy: nn.Module, inputs: Any, number: int, length: int, num_ranks: int, told: Told | None
) -> list[Seen]:
    """The functions that a model calls in its forward pass of samples without memory.

    Args:
        number, length: how many tokens the inputs have, and how many of them a sample has here.
        num_ranks: of a row that shares out the tokens; the last rank is watched.
    """
    runs = Runs(LastAlone(num_ranks))
    runs.num_tokens = length
    leaves, nesting = tree_flatten(inputs)
    leaves = [first_of(leaf, number, length)[:, runs.mine] if has_tokens(leaf, number) else leaf for leaf in leaves]
    shared = attending_in_thread(runs) if num_ranks > 1 else nullcontext()
    with (
        Path() as path,
        replacing_attention(copy, attention),
        shared,
        positions_told(copy, told, runs.mine, torch.device("cpu")),
    ):
        known.call(copy, tree_unflatten(leaves, nesting))
    return path.calls
