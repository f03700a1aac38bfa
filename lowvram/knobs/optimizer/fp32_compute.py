"""Runs any optimizer in fp32 although its weights or its states are kept in fewer bits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from types import MappingProxyType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowvram.compat.torch_ops import CopyOps
from lowvram.core.rounding import CORRECTION, MOST_SEEDS, Rounding, noise_of
from lowvram.core.seeds import seed_of
from lowvram.core.shards import is_off_mesh, local, on_mesh
from lowvram.core.states import placed_value
from lowvram.knobs.optimizer.state_formats import ALIGNMENT, AS_COMPUTED, SCALES, Piece, StateFormat, share_memory

PIECE_ELEMENTS = 2**22  # of a parameter that are converted at a time: 16 MiB for each copy in fp32
VECTOR_NUMEL = 2**14  # of vectors that are updated together, at most
STEP = "step"  # torch's name of the count of updates: a number, even in the state of a parameter that is one itself


@dataclass(frozen=True)
class RoundingPolicy:
    """How the optimizers of one rig round their updates. Each draws noise of its own, by its number."""

    rounding: Rounding | None = None  # of weights of fewer bits; None: the optimizer rounds itself
    numbers: Iterator[int] = field(default_factory=count)  # for the optimizers, in the order in which they are made


def with_fp32_compute(
    inner: torch.optim.Optimizer,
    policy: RoundingPolicy,
    formats: Mapping[str, StateFormat] | None = None,
    piece_elements: int | None = None,
) -> torch.optim.Optimizer:
    """`inner`, run in fp32 if its weights or its states have fewer bits; else `inner` itself.

    Args:
        formats: how states are kept between steps, by their names; others in the dtype in which they are computed.
        piece_elements: for an element-wise update, how many elements may be converted at a time. None: the update needs
            whole parameters, and sharded ones are converted shard by shard as DTensors.
    """
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    is_narrow = bool(formats) or (
        policy.rounding is not None and any(parameter.dtype.itemsize < 4 for parameter in parameters)
    )
    must_move = piece_elements is None and any(map(is_off_mesh, parameters))
    return FP32ComputeOptimizer(inner, policy, formats or {}, piece_elements) if is_narrow or must_move else inner


@contextmanager
def noise_of_step(groups: list[dict[str, Any]]) -> Iterator[None]:
    """Inside it rounding draws the noise of an optimizer's next step, which depends on the optimizer's number and on
    its count of steps. Both are in its first parameter group, so its state_dict keeps them."""
    first = groups[0]
    first["noise_step"] += 1
    with noise_of(local(first["params"][0]).device, first["noise_of"], first["noise_step"]):
        yield


class Weight(NamedTuple):
    """A piece of a weight, as it is kept."""

    values: Tensor
    correction: Tensor | None  # what its rounding keeps beside it


Trained = tuple[nn.Parameter, dict[str, Any]]  # a parameter that has a gradient, and its group


class RoundingOptimizer(torch.optim.Optimizer, ABC):
    """Updates one parameter after the other in fp32, whatever the dtype in which its weight is kept."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        policy: RoundingPolicy,
        formats: Mapping[str, StateFormat] = MappingProxyType({}),
        **fields: Any,
    ) -> None:
        super().__init__(groups, fields)
        self.rounding, self.formats = policy.rounding, formats
        self.param_groups[0] |= {"noise_of": next(policy.numbers), "noise_step": 0, "kept_as": self.kept_as()}

    def kept_as(self) -> str:
        """The formats, in words: a saved state in others must not be loaded."""
        dtypes = {name: format.dtype for name, format in self.formats.items()}
        return str(dtypes | {CORRECTION: self.rounding and self.rounding.correction_dtype})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        trained = [
            (parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        with noise_of_step(self.param_groups):
            self.begin_step(trained)
            self.update_all(trained)
            self.end_step()

    def begin_step(self, trained: Sequence[Trained]) -> None:
        """What must be known of all parameters before one of them is updated. Default: nothing."""
        del trained

    def end_step(self) -> None:
        """Called when all parameters are updated. Default: nothing."""

    def update_all(self, trained: Sequence[Trained]) -> None:
        for parameter, group in trained:
            self.update(parameter, group)

    @abstractmethod
    def update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Update a parameter, which has a gradient, and its state."""

    def weight_of(self, parameter: nn.Parameter, piece: Piece) -> Weight:
        """A piece of a weight, which shares its memory."""
        correction = self.correction_of(parameter)
        return Weight(piece.of(parameter.detach()), None if correction is None else piece.of(correction))

    def correction_of(self, parameter: nn.Parameter) -> Tensor | None:
        """What the rounding keeps beside a weight; zeros before the first update."""
        kept, dtype = self.state[parameter], self.rounding and self.rounding.correction_dtype
        if dtype is None or parameter.dtype.itemsize >= 4:
            return None
        if CORRECTION not in kept:
            kept[CORRECTION] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        return kept[CORRECTION]

    def widened(self, weight: Weight) -> Tensor:
        """A piece of a weight in the dtype in which it is updated; the piece itself if it is kept in this dtype."""
        wide = in_compute_dtype(weight.values)
        if weight.correction is not None:
            assert self.rounding is not None
            self.rounding.restore(wide, weight.correction)
        return wide

    def write(self, weight: Weight, exact: Tensor) -> None:
        """Write a piece of a weight back, unless it was updated in place."""
        if exact.dtype is not weight.values.dtype and self.rounding is not None:
            self.rounding.write(weight.values, weight.correction, exact)
        elif not share_memory(weight.values, exact):
            local(weight.values).copy_(local(exact))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        keep_formats(self, state_dict)


@final
class FP32ComputeOptimizer(RoundingOptimizer):
    """Converts one parameter after the other (a large one in pieces, small vectors together) and its states to fp32,
    has `inner` update them, and rounds them back. So only a small part exists in fp32 at a time."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        policy: RoundingPolicy,
        formats: Mapping[str, StateFormat],
        piece_elements: int | None,
    ) -> None:
        super().__init__(inner.param_groups, policy, formats)
        self.inner, self.piece_elements = inner, piece_elements
        self.new_settings: dict[int, dict[str, Any]] = {}  # of each group's last update in a step, by its place
        self.num_updates: dict[nn.Parameter, int] = {}  # of vectors: to read them from a card would wait for it

    def update_all(self, trained: Sequence[Trained]) -> None:
        alike = defaultdict[Any, list[Trained]](list)
        for number, (parameter, group) in enumerate(trained):
            alike[self.likeness(parameter, group) or number].append((parameter, group))
        for each in alike.values():
            if len(each) > 1:
                self.update_vectors([parameter for parameter, _ in each], each[0][1])
            else:
                self.update(*each[0])

    def likeness(self, parameter: nn.Parameter, group: dict[str, Any]) -> tuple[Any, ...] | None:
        """What small vectors have in common that an element-wise update can compute as one; None of other
        parameters. Those that don't fill a processor's vectors stay alone: torch rounds their ends otherwise."""
        is_small = parameter.dim() == 1 and parameter.numel() <= VECTOR_NUMEL and parameter.numel() % ALIGNMENT == 0
        if self.piece_elements is None or not is_small or isinstance(parameter, DTensor) or parameter.grad is None:
            return None
        numbers, averages = numbers_and_averages(self.state.get(parameter, {}), parameter)
        if numbers.keys() - {STEP}:
            return None
        if STEP not in numbers:
            self.num_updates[parameter] = 0
        elif parameter not in self.num_updates:
            self.num_updates[parameter] = int(numbers[STEP])
        dtypes = (parameter.dtype, parameter.grad.dtype)
        return (id(group), parameter.device, *dtypes, tuple(averages), self.num_updates[parameter])

    def update_vectors(self, vectors: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        """Update vectors as one: the host takes longer to begin an update than a device for so little work."""
        sizes = [vector.numel() for vector in vectors]
        corrections = [each for each in map(self.correction_of, vectors) if each is not None]
        weight = Weight(torch.cat([each.detach() for each in vectors]), torch.cat(corrections) if corrections else None)
        stand_in = nn.Parameter(self.widened(weight))
        stand_in.grad = in_compute_dtype(torch.cat([each.grad for each in vectors if each.grad is not None]))
        parts = stand_in.detach().split(sizes)
        numbers, averages = numbers_and_averages(self.state[vectors[0]], vectors[0])
        wide = {name: torch.cat([*map(partial(self.read_whole, name), vectors, parts)]) for name in averages}
        numbers, wide = numbers_and_averages(self.updated(stand_in, copied(numbers) | wide, group), stand_in)
        stand_in.grad = None
        for name in list(wide):
            for vector, part in zip(vectors, wide.pop(name).split(sizes), strict=True):
                self.keep(vector, whole_piece(vector), name, part)
        self.write(weight, stand_in.detach())
        if weight.correction is not None:
            CopyOps.COPY_MANY.default(corrections, [*weight.correction.split(sizes)])
        CopyOps.COPY_MANY.default([each.detach() for each in vectors], [*weight.values.split(sizes)])
        for vector in vectors:
            self.state[vector] |= copied(numbers)
            self.num_updates[vector] += 1

    def read_whole(self, name: str, parameter: nn.Parameter, like: Tensor) -> Tensor:
        return self.formats.get(name, AS_COMPUTED).read(self.state[parameter], name, whole_piece(parameter), like)

    def update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        numbers, averages = numbers_and_averages(self.state[parameter], parameter)
        last_numbers = numbers
        for piece in pieces(parameter, self.piece_elements):
            last_numbers = self.update_piece(parameter, piece, copied(numbers), averages, group)
        self.state[parameter] |= last_numbers
        if parameter in self.num_updates:
            self.num_updates[parameter] += 1

    def update_piece(
        self,
        parameter: nn.Parameter,
        piece: Piece,
        numbers: dict[str, Any],
        averages: Iterable[str],
        group: dict[str, Any],
    ) -> dict[str, Any]:
        """Update a piece of a weight, and what its state holds of its elements; returns the new numbers.

        Args:
            averages: the names of what the state held of the elements before this update.
        """
        kept, weight, gradient = self.state[parameter], self.weight_of(parameter, piece), parameter.grad
        assert gradient is not None
        stand_in = nn.Parameter(self.widened(weight))
        stand_in.grad = in_compute_dtype(piece.of(gradient))
        wide = {name: self.formats.get(name, AS_COMPUTED).read(kept, name, piece, stand_in) for name in averages}
        numbers, wide = numbers_and_averages(self.updated(stand_in, numbers | wide, group), parameter)
        stand_in.grad = None
        for name in list(wide):  # each is freed before the next one, and the weight, are rounded
            self.keep(parameter, piece, name, wide.pop(name))
        self.write(weight, stand_in.detach())
        return numbers

    def keep(self, parameter: nn.Parameter, piece: Piece, name: str, exact: Tensor) -> None:
        """Write a piece of a state; the first one makes room for the whole state."""
        kept, format = self.state[parameter], self.formats.get(name, AS_COMPUTED)
        if name not in kept:
            like = exact if piece.is_whole else parameter
            kept |= format.new(name, like, exact.dtype, local(parameter).device)
        # No number of the parameter: with an optimizer for each, all would have the same one.
        seed = seed_of(f"{self.param_groups[0]['noise_step']}:{name}") % MOST_SEEDS + piece.elements.start
        format.write(kept, name, piece, exact, seed)

    def updated(self, stand_in: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
        """Update one piece of a weight in place; returns its new state in the dtype in which it was computed."""
        settings = copied({name: value for name, value in group.items() if name != "params"})
        self.inner.param_groups = [{**settings, "params": [stand_in]}]
        self.inner.state = defaultdict(dict, {stand_in: state})
        self.inner.step()
        new = {name: value for name, value in self.inner.state[stand_in].items() if value is not None}
        settings = {name: value for name, value in self.inner.param_groups[0].items() if name != "params"}
        self.new_settings[place_of(group, self.param_groups)] = settings
        self.inner.param_groups, self.inner.state = [], defaultdict(dict)  # let go of the wide copies
        return new

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.num_updates = {}

    def end_step(self) -> None:
        """Keep what an optimizer holds in its groups, such as a count of steps. All updates of a step begin with the
        same values."""
        for place, settings in self.new_settings.items():
            self.param_groups[place] |= settings
        self.new_settings = {}


def place_of(group: dict[str, Any], groups: list[dict[str, Any]]) -> int:
    return next(place for place, each in enumerate(groups) if each is group)


def numbers_and_averages(state: dict[str, Any], parameter: nn.Parameter) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a state holds once for a parameter, such as a count of steps, and what it holds of its elements. Only that
    is narrowed, and cut in pieces."""
    own = {name: value for name, value in state.items() if name != CORRECTION and not name.endswith(SCALES)}
    averages = {
        name: value
        for name, value in own.items()
        if name != STEP and isinstance(value, Tensor) and (value.ndim or not parameter.ndim)
    }
    numbers = {name: value for name, value in own.items() if name not in averages}
    return numbers, averages


def compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def in_compute_dtype(tensor: Tensor) -> Tensor:
    """A tensor in the dtype in which it is updated, on the device of its mesh; itself if it is so already."""
    return on_mesh(tensor).to(compute_dtype(tensor))


def gradient_of(parameter: nn.Parameter, piece: Piece) -> Tensor:
    """A piece of a parameter's gradient, in the dtype in which the parameter is updated."""
    assert parameter.grad is not None
    return in_compute_dtype(piece.of(parameter.grad))


def copied(numbers: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else deepcopy(value) if is_container(value) else value
        for name, value in numbers.items()
    }


def is_container(value: Any) -> bool:
    return isinstance(value, list | dict | set)


def whole_piece(parameter: nn.Parameter) -> Piece:
    return Piece(None, slice(0, parameter.numel()))


def pieces(parameter: nn.Parameter, piece_elements: int | None) -> Iterator[Piece]:
    """The pieces of a parameter (of this rank's shard) that are updated one after the other; with None, the whole."""
    if piece_elements is None:
        yield whole_piece(parameter)
        return
    shard = local(parameter.detach())
    num_rows = len(shard) if shard.ndim else 1
    row_elements = max(1, shard.numel() // max(1, num_rows))
    aligned = ALIGNMENT // math.gcd(ALIGNMENT, row_elements)  # rows
    rows_at_once = max(aligned, piece_elements // row_elements // aligned * aligned)
    for start in range(0, num_rows, rows_at_once):
        end = min(num_rows, start + rows_at_once)
        yield Piece(slice(start, end), slice(start * row_elements, end * row_elements))


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
                optimizer.state[parameter][name] = placed_value(value.to(parameter.device), parameter)
