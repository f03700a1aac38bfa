"""Runs any optimizer in fp32 although its weights or its states are kept in fewer bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.core.rounding import noise_of, stochastically
from lowvram.core.shards import is_off_mesh, local, on_mesh

Rounding = Callable[[Tensor, Tensor], None]
PIECE_ELEMENTS = 2**22  # of a parameter that are converted at a time: 16 MiB for each copy in fp32
STEP = "step"  # torch's name of the count of updates: a number, even in the state of a parameter that is one itself


@dataclass(frozen=True)
class RoundingPolicy:
    """How the optimizers of one rig round their updates. Each draws noise of its own, by its number."""

    rounding: Rounding | None = None  # writes an fp32 weight into one of fewer bits; None: the optimizer rounds itself
    numbers: Iterator[int] = field(default_factory=count)  # for the optimizers, in the order in which they are made


def with_fp32_compute(
    inner: torch.optim.Optimizer,
    policy: RoundingPolicy,
    state_dtype: torch.dtype = torch.float32,
    piece_elements: int | None = None,
) -> torch.optim.Optimizer:
    """`inner`, run in fp32 if its weights or its states have fewer bits; else `inner` itself.

    Args:
        state_dtype: the dtype in which states are kept between steps.
        piece_elements: for an element-wise update, how many elements may be converted at a time. None: the update needs
            whole parameters, and sharded ones are converted shard by shard as DTensors.
    """
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    is_narrow = state_dtype is not torch.float32 or (
        policy.rounding is not None and any(parameter.dtype.itemsize < 4 for parameter in parameters)
    )
    must_move = piece_elements is None and any(map(is_off_mesh, parameters))
    return FP32ComputeOptimizer(inner, policy, state_dtype, piece_elements) if is_narrow or must_move else inner


@contextmanager
def noise_of_step(groups: list[dict[str, Any]]) -> Iterator[None]:
    """Inside it rounding draws the noise of an optimizer's next step, which depends on the optimizer's number and on
    its count of steps. Both are in its first parameter group, so its state_dict keeps them."""
    first = groups[0]
    first["noise_step"] += 1
    with noise_of(local(first["params"][0]).device, first["noise_of"], first["noise_step"]):
        yield


@final
class FP32ComputeOptimizer(torch.optim.Optimizer):
    """Converts one parameter after the other (a large one in pieces) and its states to fp32, has `inner` update them,
    and rounds them back. So only a small part exists in fp32 at a time."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        policy: RoundingPolicy,
        state_dtype: torch.dtype,
        piece_elements: int | None,
    ) -> None:
        super().__init__(inner.param_groups, {})
        self.param_groups[0] |= {"noise_of": next(policy.numbers), "noise_step": 0}
        self.inner, self.state_dtype, self.piece_elements = inner, state_dtype, piece_elements
        self.rounding: Callable[[Tensor, Tensor], Any] = policy.rounding or Tensor.copy_

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        with noise_of_step(self.param_groups):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.update(parameter, group)
        self.inner.param_groups, self.inner.state = [], defaultdict(dict)  # let go of the last wide copy

    def update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        kept, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        numbers, averages = numbers_and_averages(kept, parameter)
        last_numbers = numbers
        for rows in pieces(parameter, self.piece_elements):
            narrow = {name: rows(value) for name, value in averages.items()}
            state = self.updated(rows(parameter.detach()), rows(gradient), copied(numbers), narrow, group)
            last_numbers, wide = numbers_and_averages(state, parameter)
            for name, value in wide.items():
                if name not in kept:
                    kept[name] = self.new_state(parameter, value)
                self.put(rows(kept[name]), value)
        kept |= last_numbers

    def updated(
        self,
        weight: Tensor,
        gradient: Tensor,
        numbers: dict[str, Any],
        averages: dict[str, Tensor],
        group: dict[str, Any],
    ) -> dict[str, Any]:
        """Update one piece of a weight in place; returns its new state in the dtype in which it was computed."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        stand_in = nn.Parameter(on_mesh(weight).to(dtype))
        stand_in.grad = on_mesh(gradient).to(dtype)
        self.inner.param_groups = [{**group, "params": [stand_in]}]
        wide = {name: on_mesh(value).to(dtype) for name, value in averages.items()}
        self.inner.state = defaultdict(dict, {stand_in: numbers | wide})
        self.inner.step()
        if dtype is not weight.dtype:
            self.rounding(weight, stand_in.detach())
        elif not share_memory(weight, stand_in):
            local(weight).copy_(local(stand_in.detach()))
        return {name: value for name, value in self.inner.state[stand_in].items() if value is not None}

    def new_state(self, parameter: nn.Parameter, wide: Tensor) -> Tensor:
        """An empty state in the dtype in which it is kept. With pieces, it has the shape of the parameter."""
        dtype = self.state_dtype if self.state_dtype.itemsize < wide.dtype.itemsize else wide.dtype
        like = wide if self.piece_elements is None else parameter
        return torch.empty_like(like, dtype=dtype, device=local(parameter).device)

    def put(self, kept: Tensor, wide: Tensor) -> None:
        """Write a state back, unless it was updated in place."""
        if kept.dtype is not wide.dtype:
            stochastically(kept, wide)
        elif not share_memory(kept, wide):
            local(kept).copy_(local(wide))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        keep_formats(self, state_dict)


def numbers_and_averages(state: dict[str, Any], parameter: nn.Parameter) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a state holds once for a parameter, such as a count of steps, and what it holds of its elements. Only that
    is narrowed, and cut in pieces."""
    averages = {
        name: value
        for name, value in state.items()
        if name != STEP and isinstance(value, Tensor) and (value.ndim or not parameter.ndim)
    }
    return {name: value for name, value in state.items() if name not in averages}, averages


def copied(numbers: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in numbers.items()}


def share_memory(one: Tensor, other: Tensor) -> bool:
    return local(one).untyped_storage() is local(other.detach()).untyped_storage()


def pieces(parameter: nn.Parameter, piece_elements: int | None) -> Iterator[Callable[[Tensor], Tensor]]:
    """Functions that cut the same rows out of a parameter, its gradient and its states (of this rank's shards); with
    None, one function that returns the whole tensor."""
    if piece_elements is None:
        yield lambda tensor: tensor
        return
    shard = local(parameter.detach())
    num_rows = len(shard) if shard.ndim else 1
    rows_at_once = max(1, min(num_rows, piece_elements * num_rows // max(1, shard.numel())))
    for start in range(0, num_rows, rows_at_once):
        yield lambda tensor, start=start: torch.atleast_1d(local(tensor))[start : start + rows_at_once]


def keep_formats(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """After `load_state_dict`: give states the dtype in which they were saved. torch casts them to their parameter's,
    which may have fewer bits."""
    numbers, parameters = (
        chain.from_iterable(group["params"] for group in groups)
        for groups in (saved["param_groups"], optimizer.param_groups)
    )
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor) and name != STEP:
                optimizer.state[parameter][name] = value.to(parameter.device)
