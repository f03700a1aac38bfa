"""segments: where the inputs of blocks come from, how often each block runs, and what is kept meanwhile."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from lowvram.core.segments import Segment, Segments
from tests.laboratory import relative_error

WIDTH, NUM_BLOCKS = 8, 6
CALLS = SimpleNamespace(of=Counter[nn.Module]())  # a dictionary of a file would be put back for recomputations


class Block(nn.Module):
    """Hands on two tensors; counts its calls where a recomputation doesn't undo that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor, *, factor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        CALLS.of[self] += 1
        y = nn.functional.dropout(self.layer(x).tanh(), 0.3) * factor
        return x + y, {"other": other + y.square()}


class Model(nn.Module):
    """Calls its blocks by position and by name; `between` may change what one hands to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def between(self, number: int, x: Tensor) -> Tensor:
        del number
        return x

    def forward(self, x: Tensor) -> Tensor:
        other = factor = self.scale.exp()
        for number, block in enumerate(self.blocks):
            x, more = block(self.between(number, x), other, factor=factor)
            other = more["other"]
        return (x * other).sum()


class WithSums(Model):
    """Makes a new tensor before the fourth block."""

    def between(self, number: int, x: Tensor) -> Tensor:
        return x + 1 if number == 3 else x


class InPlace(Model):
    """Changes a tensor in place before the third block."""

    def between(self, number: int, x: Tensor) -> Tensor:
        return x.mul_(2) if number == 2 else x


MODELS = [Model, WithSums, InPlace]


def made(kind: type[Model], length: int | None) -> Model:
    torch.manual_seed(0)
    model = kind()
    if length is not None:
        segments = Segments(length)
        for block in model.blocks:
            segments.recompute(block)
    return model


def gradients(model: Model, num_passes: int = 1) -> dict[str, Tensor]:
    """Those of a fixed batch, summed over backward passes through the same graph."""
    torch.manual_seed(1)
    loss = model(torch.rand(4, WIDTH))
    for number in range(num_passes):
        loss.backward(retain_graph=number < num_passes - 1)
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.sampled
@pytest.mark.parametrize("num_passes", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_the_same_to_the_last_bit(kind: type[Model], length: int, num_passes: int) -> None:
    """With dropout, keyword arguments, several outputs; also by a second backward pass."""
    found, wanted = (gradients(made(kind, each), num_passes) for each in (length, None))
    assert relative_error(found, wanted) == 0


@pytest.mark.parametrize(
    ("kind", "length", "calls"),
    [
        (Model, 1, [2, 2, 2, 2, 2, 2]),
        (Model, 2, [3, 2, 3, 2, 3, 2]),
        (Model, 3, [3, 3, 2, 3, 3, 2]),
        (Model, 4, [3, 3, 3, 2, 3, 2]),
        (Model, 9, [3, 3, 3, 3, 3, 2]),
        (WithSums, 9, [3, 3, 3, 3, 3, 2]),  # `other` is handed on as it is, so the segment goes on
    ],
)
def test_all_but_the_last_block_of_a_segment_run_three_times(kind: type[Model], length: int, calls: list[int]) -> None:
    model = made(kind, length)
    gradients(model)
    assert [CALLS.of[block] for block in model.blocks] == calls


def test_evaluation_runs_each_block_once() -> None:
    model = made(Model, 3)
    with torch.no_grad():
        model(torch.rand(4, WIDTH))
    assert [CALLS.of[block] for block in model.blocks] == [1] * NUM_BLOCKS


def test_a_kernel_is_chosen_as_in_the_forward_pass() -> None:
    """As torch's attention is, by whether its mask requires a gradient."""

    class Choosing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (3 if x.requires_grad and torch.is_grad_enabled() else 2) * x

    def gradient(length: int | None) -> Tensor:
        model, x = nn.Sequential(*(Choosing() for _ in range(3))), torch.tensor([1.5], requires_grad=True)
        segments = Segments(length or 1)
        for block in model if length else ():
            segments.recompute(block)
        model(x).backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(3), gradient(None))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_segment_ends_with_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the help of the garbage collector, which runs at random times."""
    alive = weakref.WeakSet[Segment]()
    begin = Segment.begin
    monkeypatch.setattr(Segment, "begin", lambda self, call: (alive.add(self), begin(self, call))[1])
    model = made(Model, 3)
    with no_garbage_collection():
        loss = model(torch.rand(4, WIDTH))
        assert len(alive) == 2
        loss.backward()
        assert len(alive) == 0
        loss = model(torch.rand(4, WIDTH))
        del loss  # a graph that is never walked
        assert len(alive) == 0


def test_what_is_computed_again_is_freed_as_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    held = list[int]()
    arguments = Segment.arguments

    def counting(self: Segment, number: int) -> object:
        result = arguments(self, number)
        held.append(len(self.again))
        return result

    monkeypatch.setattr(Segment, "arguments", counting)
    gradients(made(Model, 6))
    assert held == [2 * number for number in (4, 3, 2, 1, 0)] + [0]


def test_an_input_that_is_changed_in_place_after_it_was_kept_is_an_error() -> None:
    model = made(Model, 3)
    x = torch.rand(4, WIDTH)
    loss = model(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
