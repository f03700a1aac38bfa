"""Keeps the buffers that forward passes change the same on all ranks, each of which sees other samples."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_modules import RunningNorm
from lowvram.compat.torch_versions import version
from lowvram.core.mesh import Ranks, target_ranks, tell


@final
class RankBuffers:
    """The buffers of a model. All ranks must make one, and call its methods, together.

    Running statistics of norms become their mean over the ranks, in which a rank weighs as much as its samples. Of any
    other buffer that some rank has changed in a step all ranks get the values of rank 0, as with torch's
    DistributedDataParallel; a line names it once if ranks have had different ones.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.names = model, [*others(model)]
        self.ranks = target_ranks()
        self.hosts = self.ranks.on_hosts() if self.names else None
        self.before: dict[str, tuple[Tensor, int]] = {}
        self.told: set[str] = set()

    def begin(self) -> None:
        """Called before the forward passes of a step."""
        self.before = {name: (buffer, version(buffer)) for name, buffer in others(self.model).items()}

    @torch.no_grad()
    def end(self, weight: float | None = None) -> None:
        """Called after the forward passes of a step.

        Args:
            weight: see `slices.weight_among_ranks`.
        """
        average_statistics(self.model, weight)
        if self.hosts is None:
            return
        now = others(self.model)
        changed = self.changed(now, self.hosts)
        if not changed:
            return
        differing = [int(not same_as_first(now[name], self.ranks)) for name in changed]
        flags = self.hosts.largest(differing)
        if new := [name for name, flag in zip(changed, flags, strict=True) if flag and name not in self.told]:
            self.told.update(new)
            tell(
                f"note: forward passes change {', '.join(new)}, on each rank by its own samples: all ranks get the"
                " values of rank 0 after each step"
            )

    def changed(self, now: dict[str, Tensor], hosts: Ranks) -> list[str]:
        """The names of the buffers that some rank has changed in this step, and that have one size on all ranks."""
        numbers: list[int] = []
        for name in self.names:
            buffer, (old, num_changes) = now.get(name), self.before.get(name, (None, 0))
            size = -1 if buffer is None else buffer.numel()
            numbers += [int(buffer is not old or (old is not None and version(old) != num_changes)), size, -size]
        largest_of = iter(hosts.largest(numbers))
        of_names = zip(self.names, largest_of, largest_of, largest_of, strict=True)
        return [name for name, has_changed, most, minus_least in of_names if has_changed and most == -minus_least > 0]


def others(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that aren't those of a norm with running statistics, by name."""
    of_norms = {each for norm in norms(model) for each in norm.buffers(recurse=False)}
    return {name: buffer for name, buffer in model.named_buffers() if buffer not in of_norms}


def norms(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, RunningNorm)]


def same_as_first(buffer: Tensor, ranks: Ranks) -> bool:
    """Give a buffer the values that it has on the first of some ranks; returns whether it had them. A collective."""
    own = buffer.detach().contiguous().reshape(-1).view(torch.uint8)
    sent = own.clone()
    ranks.send_from_first(sent)
    is_same = torch.equal(own, sent)
    if not is_same:
        buffer.detach().copy_(sent.view(buffer.dtype).view(buffer.shape))
    return is_same


@torch.no_grad()
def average_statistics(model: nn.Module, weight: float | None = None) -> None:
    """Give norms the same running statistics on all ranks: their mean over the ranks. A collective.

    Args:
        weight: of this rank in the mean, relative to the mean weight; None on all ranks: equal weights.
    """
    training = [norm for norm in norms(model) if norm.training]
    statistics = [tensor for norm in training for tensor in (norm.running_mean, norm.running_var) if tensor is not None]
    if statistics:
        ranks = target_ranks()
        own = torch.cat(statistics) if weight is None else torch.cat(statistics).mul_(weight)
        means = ranks.sum(own) / ranks.size
        for tensor, mean in zip(statistics, means.split([len(tensor) for tensor in statistics]), strict=True):
            tensor.copy_(mean)
