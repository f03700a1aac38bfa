"""stepping=cpu_offload: fp32 master weights, optimizer state and gradients are kept in host memory, where the CPU
computes the updates.

Ren et al., "ZeRO-Offload" (2021). torchao's CPUOffloadOptimizer does the same without clipping, accumulation and
schedules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_autograd import version_of
from lowvram.compat.torch_trees import tree_leaves
from lowvram.config.errors import require
from lowvram.core import host
from lowvram.core.copies import register_copy
from lowvram.core.fact import Fact
from lowvram.core.hooks import when_accumulated
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Stage
from lowvram.core.probes.weights import REAL_WEIGHTS, SEPARATE_MEMORY
from lowvram.core.probes.writes import STEADY_WEIGHTS
from lowvram.core.rates import set_rates
from lowvram.core.rig import MakeOptimizer, Rig, is_finite
from lowvram.core.rounding import forget
from lowvram.core.shards import local, placed, spread_as
from lowvram.core.stepper import Stepper, Update
from lowvram.knobs.stepping.after_backward import AfterBackward
from lowvram.knobs.stepping.host_sums import HostSums
from lowvram.knobs.stepping.scaling import check_clip, factor, rescale

BUCKET_BYTES = 2**24  # of master weights that one optimizer updates; copying them back overlaps with the next bucket


@dataclass(frozen=True)
class CpuOffload(Knob):
    """fp32 master weights, optimizer state and gradients are kept on the host, which computes the updates."""

    clip: float | None = None
    offload_fraction: float = 1.0

    stage = Stage.STEPPING
    moves_to_host = True
    saves = Kind.OPTIMIZER
    needs_always = frozenset(
        {Fact.PLAIN_BACKWARD, Fact.SEPARATE_UPDATES, SEPARATE_MEMORY, REAL_WEIGHTS, STEADY_WEIGHTS}
    )
    breaks_always = frozenset({Fact.GRADS_AT_UPDATE})
    remedy = (Kind.OPTIMIZER, 30)

    def __post_init__(self) -> None:
        check_clip(self.clip)
        fraction, allowed = self.offload_fraction, "between 0 (all state on the device) and 1 (all on the host)"
        require(0 <= fraction <= 1, "stepping.offload_fraction", fraction, allowed)

    def reference(self) -> AfterBackward:
        return AfterBackward(self.clip)

    def clips_at(self) -> float | None:
        return self.clip

    def apply(self, rig: Rig) -> Rig:
        stepper = CpuOffloadStepper(rig.updated, rig.make_optimizer, self.clip, self.offload_fraction)
        return replace(rig, stepper=stepper)


@final
class CpuOffloadStepper(Stepper):
    """The host updates some parameters ("offloaded"), the device the others ("kept"); the gradient norm is over all.

    An offloaded weight on the device is its fp32 master rounded to nearest. The master keeps what rounding loses, so
    weights of few bits need no stochastic rounding.
    """

    def __init__(
        self, parameters: list[nn.Parameter], make_optimizer: MakeOptimizer, clip: float | None, fraction: float
    ) -> None:
        offloaded = largest_within(parameters, fraction)
        self.kept = [parameter for parameter in parameters if parameter not in offloaded]
        self.clip, self.fraction = clip, fraction
        self.divisor: Tensor | float = 1.0
        self.sums = HostSums(list(offloaded))
        self.masters = {parameter: master_of(parameter) for parameter in parameters if parameter in offloaded}
        self.buckets = [
            Bucket(self.masters, bucket, make_optimizer, self.sums) for bucket in in_buckets(list(self.masters))
        ]
        self.kept_optimizers = [make_optimizer(self.kept)] if self.kept else []  # one; none if all are offloaded
        self.versions = {parameter: version_of(local(parameter)) for parameter in self.masters}
        for parameter in self.masters:
            when_accumulated(parameter, self.sums.take_one)

    def begin(self, num_parts: int, divisor: Tensor | float = 1.0) -> None:
        self.divisor = divisor
        self.sums.begin(num_parts)
        self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        """Copy weights that others have written since the last step, such as loaded ones, into their masters."""
        for parameter, master in self.masters.items():
            if version_of(local(parameter)) != self.versions[parameter]:
                local(master).copy_(local(parameter))
        self.note_versions()

    def note_versions(self) -> None:
        self.versions = {parameter: version_of(local(parameter)) for parameter in self.masters}

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    @torch.no_grad()
    def update(self) -> Update:
        squares = self.sums.squares()
        kept = [parameter.grad for parameter in self.kept if parameter.grad is not None]
        for gradient in kept:
            squares.add(local(gradient), gradient)
        norm = squares.total().sqrt() / self.divisor
        applied = is_finite(norm)
        if applied:
            by = factor(norm, self.clip, self.divisor)
            rescale(kept, by)
            for optimizer in self.kept_optimizers:
                optimizer.step()
            self.update_on_host(None if by is None else by.cpu())
        for parameter in self.kept:
            parameter.grad = None
        return Update(norm, applied)

    def update_on_host(self, by: Tensor | None) -> None:
        """Update one bucket after the other. Meanwhile gradients of the next buckets arrive, and weights of the
        previous ones are copied back."""
        for link in self.sums.links.values():
            link.rest()  # masters are written into from here on, and the last step's copies may still read them
        for bucket in self.buckets:
            bucket.update(by)
        for link in self.sums.links.values():
            link.join()
        self.note_versions()

    def forget(self, parameters: Collection[nn.Parameter]) -> None:
        """Masters stay, since weights of few bits have lost what their masters keep."""
        self.sums.forget(parameters)
        for bucket in self.buckets:
            bucket.forget(parameters)
        for optimizer in self.kept_optimizers:
            for parameter in parameters:
                forget(optimizer.state, parameter)

    def set_lr(self, lr: float) -> None:
        for optimizer in self.optimizers():
            set_rates(optimizer, lr)

    def optimizers(self) -> Iterator[torch.optim.Optimizer]:
        yield from (bucket.optimizer for bucket in self.buckets)
        yield from self.kept_optimizers

    def state_dict(self) -> dict[str, Any]:
        """Masters and optimizer states; copies nothing. Those of offloaded parameters are CPU tensors, the others are
        on the device."""
        return {
            "masters": [master.detach() for master in self.masters.values()],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers()],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Call it after the weights are loaded: weights loaded later would overwrite the masters (see `follow`)."""
        masters = list(self.masters.values())
        is_same = [master.shape for master in masters] == [saved.shape for saved in state["masters"]]
        require(is_same, "stepping.offload_fraction", self.fraction, "what it was when this state was saved")
        for link in self.sums.links.values():
            link.rest()
        for master, saved in zip(masters, state["masters"], strict=True):
            local(master).copy_(local(placed(saved, master)))
        for optimizer, its_state in zip(self.optimizers(), state["optimizers"], strict=True):
            optimizer.load_state_dict(its_state)
        for bucket in self.buckets:
            bucket.mark_state()
        self.note_versions()


@final
class Bucket:
    """Some offloaded parameters, with the optimizer that updates their masters on the CPU."""

    def __init__(
        self,
        masters: dict[nn.Parameter, nn.Parameter],
        parameters: list[nn.Parameter],
        make_optimizer: MakeOptimizer,
        sums: HostSums,
    ) -> None:
        self.masters = {parameter: masters[parameter] for parameter in parameters}
        self.optimizer = make_optimizer(list(self.masters.values()))
        self.sums, self.num_marked = sums, 0

    def update(self, by: Tensor | None) -> None:
        """Update the masters with the gradients multiplied by `by`, and start copying the new weights to the device."""
        gradients = {parameter: self.sums.wait_for(parameter) for parameter in self.masters if parameter in self.sums}
        rescale(list(gradients.values()), by)
        for parameter, gradient in gradients.items():
            self.masters[parameter].grad = spread_as(parameter, gradient)
        with host.computing():
            self.optimizer.step()
        if len(self.optimizer.state) != self.num_marked:
            self.mark_state()
        for parameter in gradients:
            self.masters[parameter].grad = None
            weight = local(parameter)
            self.sums.links[weight.device].send(weight, local(self.masters[parameter]))

    def forget(self, parameters: Collection[nn.Parameter]) -> None:
        """Free the optimizer's state of these parameters."""
        for parameter in parameters:
            if parameter in self.masters:
                self.optimizer.state.pop(self.masters[parameter], None)
        self.num_marked = len(self.optimizer.state)

    def mark_state(self) -> None:
        """Mark the state that the optimizer has made as host memory."""
        for leaf in tree_leaves(list(self.optimizer.state.values())):
            if isinstance(leaf, Tensor):
                host.mark(leaf)
        self.num_marked = len(self.optimizer.state)


@torch.no_grad()
def master_of(parameter: nn.Parameter) -> nn.Parameter:
    """A copy of the parameter in host memory, in fp32 (fp64 if the parameter is), sharded as the parameter is."""
    weight = local(parameter)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    master = host.empty(weight.shape, dtype, weight.device).copy_(weight)
    return register_copy(nn.Parameter(spread_as(parameter, master)), parameter)


def largest_within(parameters: list[nn.Parameter], fraction: float) -> set[nn.Parameter]:
    """The largest parameters that together hold at most this share of all elements."""
    chosen: set[nn.Parameter] = set()
    left = fraction * sum(parameter.numel() for parameter in parameters)
    for parameter in sorted(parameters, key=lambda parameter: -parameter.numel()):
        if parameter.numel() <= left:
            chosen.add(parameter)
            left -= parameter.numel()
    return chosen


def in_buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters in buckets of `BUCKET_BYTES`, the last ones first: their gradients arrive first."""
    buckets: list[list[nn.Parameter]] = []
    filled_bytes = BUCKET_BYTES
    for parameter in reversed(parameters):
        if filled_bytes >= BUCKET_BYTES:
            buckets.append([])
            filled_bytes = 0
        buckets[-1].append(parameter)
        filled_bytes += 4 * parameter.numel()
    return buckets
