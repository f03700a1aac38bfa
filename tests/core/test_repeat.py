"""Blocks that are computed again: as they ran first, or refused in one sentence."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowvram
from lowvram.config.errors import Incompatible
from lowvram.core import witness
from lowvram.core.fingerprints import fingerprint
from lowvram.core.generators import seed_all
from lowvram.core.repeat import NUM_CHECKED, Repeatable
from lowvram.knobs.ckpt.chosen import recompute
from tests.restless import CLASSES, WIDTH, Mlp, Net

CKPT = ("ckpt=every1", "ckpt=sqrt", "ckpt=selective")
LR, STEPS = 0.05, 4
pytestmark = pytest.mark.usefixtures("in_double")


class Fast(Net):
    """Calls its blocks with other weights than theirs, as models with fast weights do."""

    def __init__(self) -> None:
        super().__init__(Mlp)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, scale in zip(self.blocks, self.scale, strict=True):
            weights = {name: weight * (1 + scale) for name, weight in block.named_parameters()}
            x = functional_call(block, weights, (x,))
        return self.head(x)


class ThroughObject(Mlp):
    """Takes an object and writes what it returns into it, as a graph's layers do."""

    def forward(self, x: Any) -> Any:
        x.inner["x"] = super().forward(x.inner["x"])
        return x


class OfObjects(Net):
    def __init__(self) -> None:
        super().__init__(ThroughObject)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = SimpleNamespace(inner={"x": self.stem(x)})
        for block in self.blocks:
            state = block(state)
        return self.head(state.inner["x"])


class OfLayers(nn.Module):
    """torch's own layers, whose attributes a model may set."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.layer = nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)
        self.convolution, self.norm = nn.Conv1d(1, 1, 3, padding=1), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.drop(self.layer(torch.tanh(self.convolution(x[:, None])[:, 0]))))


class Setting(Net):
    """Calls each block twice, otherwise each time."""

    def __init__(self) -> None:
        super().__init__(OfLayers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for time in (1, 2):
            blocks: list[Any] = list(self.blocks)
            for number, block in enumerate(blocks):
                block.drop.p = 0.2 * time
                block.convolution.dilation = block.convolution.padding = (time,)
                block.requires_grad_((time + number) % 3 > 0)
                x = block(x)
        for block in self.blocks:
            block.requires_grad_(True)
        return self.head(x)


class Forking(Mlp):
    """Draws, and sets the generator back."""

    def between(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            return F.dropout(x, 0.4, self.training)


class Dropping(Net):
    def __init__(self, block: Callable[[], nn.Module] = Forking) -> None:
        super().__init__(block)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class NormByFunction(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def between(self, x: Tensor) -> Tensor:
        norm = self.norm
        return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, self.training, 0.1)


class ReadingNorm(NormByFunction):
    """Reads the running mean before the norm updates it. At first it is frozen."""

    num_calls = 0

    def between(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        mean = self.norm.running_mean
        assert mean is not None
        self.norm.train(self.num_calls > 1)
        return x - mean.clone() + self.norm(x)


class Leaving(torch.autograd.Function):
    """Leaves something in its class for its backward pass."""

    last: Tensor

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Leaving.last = x.detach()
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * (2 + Leaving.last.mean())


class OfFunction(Mlp):
    def between(self, x: Tensor) -> Tensor:
        return Leaving.apply(x)  # pyright: ignore[reportReturnType]


class OfClass(Mlp):
    """Draws from a generator of its class, of a class of its own."""

    class Random(random.Random):
        pass

    draws: ClassVar[random.Random] = Random(3)

    def between(self, x: Tensor) -> Tensor:
        return x * self.draws.uniform(0.5, 1)


class Attending(Mlp):
    def between(self, x: Tensor) -> Tensor:
        tokens = x.view(len(x), 1, 4, -1)
        return F.scaled_dot_product_attention(tokens, tokens, tokens).flatten(1)


class WithKernel(Net):
    def __init__(self) -> None:
        super().__init__(Attending)

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Mlp": Fast,
    "ThroughObject": OfObjects,
    "OfLayers": Setting,
    "Forking": Dropping,
    "NormByFunction": lambda: Net(NormByFunction),
    "ReadingNorm": lambda: Net(ReadingNorm),
    "OfFunction": lambda: Net(OfFunction),
    "OfClass": lambda: Net(OfClass),
    "Attending": WithKernel,
}


def steps(model: Callable[[], nn.Module], block: str, knobs: str) -> tuple[nn.Module, list[float]]:
    """The model after some steps, and their losses."""
    draw = torch.Generator().manual_seed(27)
    xs, ys = torch.randn(STEPS, 6, WIDTH, generator=draw), torch.randint(CLASSES, (STEPS, 6), generator=draw)
    OfClass.draws.seed(3)
    seed_all(0)
    made, losses = model(), list[float]()
    task = lowvram.task(made, xs[0], blocks=block)
    rig = lowvram.assemble(task, f"{knobs} optimizer=sgd optimizer.lr={LR}", "cpu")
    for number, (x, y) in enumerate(zip(xs, ys, strict=True)):
        seed_all(number)
        losses.append(lowvram.step(rig, lowvram.Part(x, y))[0].item())
    return made, losses


@pytest.mark.sampled(3)
@pytest.mark.parametrize("block", MODELS)
def test_a_block_is_computed_again_as_it_was_first(block: str) -> None:
    wanted, losses = steps(MODELS[block], block, "ckpt=none")
    for knobs in CKPT:
        found, of_knob = steps(MODELS[block], block, knobs)
        assert of_knob == pytest.approx(losses, rel=1e-12), knobs
        for key, value in wanted.state_dict().items():
            torch.testing.assert_close(found.state_dict()[key], value, rtol=1e-9, atol=1e-12, msg=f"{knobs}: {key}")


class Iterating(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)

    def between(self, x: Tensor) -> Tensor:
        return x / next(self.numbers)


class InSlots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Slotted(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.held = InSlots()

    def between(self, x: Tensor) -> Tensor:
        self.held.count += 1
        return x / self.held.count


def counter() -> Callable[[], int]:
    count = 0

    def call() -> int:
        nonlocal count
        count += 1
        return count

    return call


class Closure(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.call = counter()

    def between(self, x: Tensor) -> Tensor:
        return x / (1 + 0.1 * self.call())


class Writing(Mlp):
    """Writes into a weight, from the second step on."""

    num_calls = 0

    def between(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 2:
            with torch.no_grad():
                self.b.weight.mul_(0.9)
        return x


class Clamping(Net):
    """Changes what a block returns in a way that its version doesn't tell."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            x.data.clamp_(-0.3, 0.3)
        return self.head(x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("block", [Iterating, Slotted, Closure, Writing], ids=lambda each: each.__name__)
def test_a_block_that_computes_something_else_again_is_refused(block: type[Mlp]) -> None:
    for knobs in CKPT:
        with pytest.raises(Incompatible, match=rf"^{block.__name__} doesn't compute the same .*choose ckpt=none"):
            steps(lambda: Net(block), block.__name__, knobs)


def test_a_block_whose_input_is_not_what_the_one_before_returned_is_refused() -> None:
    with pytest.raises(Incompatible, match=r"^Mlp doesn't compute the same"):
        steps(lambda: Clamping(Mlp), "Mlp", "ckpt=sqrt")
    wanted, found = (steps(lambda: Clamping(Mlp), "Mlp", knobs)[1] for knobs in ("ckpt=none", "ckpt=every1"))
    assert found == pytest.approx(wanted, rel=1e-12)


@contextmanager
def fingerprints() -> Iterator[list[Tensor]]:
    """The tensors whose fingerprints were taken inside."""
    taken = list[Tensor]()
    original = witness.fingerprint
    witness.fingerprint = lambda tensor: (taken.append(tensor), original(tensor))[1]
    try:
        yield taken
    finally:
        witness.fingerprint = original


class LateDropout(Mlp):
    num_calls = 0

    def between(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return F.dropout(x, 0.5) if self.num_calls == 8 else x


@pytest.mark.parametrize(("block", "checked"), [(Mlp, [0, 1, 2]), (LateDropout, [0, 1, 2, 8, 9])])
def test_the_first_steps_are_checked_and_those_after_something_new(block: type[Mlp], checked: list[int]) -> None:
    made, found = block(), list[int]()
    recompute(made)
    for number in range(12):
        with fingerprints() as taken:
            made(torch.randn(4, WIDTH, requires_grad=True)).sum().backward()
        found += [number] if taken else []
    assert found == [*checked]
    assert len([each for each in checked if each < NUM_CHECKED]) == NUM_CHECKED


def test_a_weight_written_between_the_passes_of_a_later_step_is_refused() -> None:
    made = Mlp()
    recompute(made)
    for _ in range(5):
        made(torch.randn(4, WIDTH)).sum().backward()
        with torch.no_grad():
            made.a.weight.mul_(0.9)
    loss = made(torch.randn(4, WIDTH)).sum()
    with torch.no_grad():
        made.a.weight.mul_(0.9)
    with pytest.raises(Incompatible, match=r"^Linear\.weight in Mlp was changed in place"):
        loss.backward()


def test_fingerprints_differ_where_values_do_and_not_by_rounding() -> None:
    draw = torch.Generator().manual_seed(5)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64):
        values = torch.randn(37, 5, 3, dtype=torch.complex64 if dtype.is_complex else torch.float64, generator=draw)
        tensor, rounded = values.to(dtype), (values * (1 + 1e-10)).to(dtype)
        first = fingerprint(tensor)
        assert first is not None
        for other, is_same in ((tensor.clone(), True), (rounded, True), (tensor * 1.1, False), (tensor.flip(0), False)):
            again = fingerprint(other)
            assert again is not None
            assert first.is_same(again) == is_same, dtype
    mask, permuted = torch.rand(50) < 0.5, torch.rand(50) < 0.5
    first, again = fingerprint(mask), fingerprint(permuted)
    assert first is not None
    assert again is not None
    assert not first.is_same(again)
    with_gaps = torch.tensor([1.0, float("nan"), float("inf")])
    first, again = fingerprint(with_gaps), fingerprint(with_gaps.clone())
    assert first is not None
    assert again is not None
    assert first.is_same(again)
    assert fingerprint(torch.empty(3, device="meta")) is None


def test_passes_that_nobody_repeats_for_a_gradient_are_not_compared() -> None:
    made = Closure()
    first, again = Repeatable(made).passes()
    with first:
        before = made(torch.ones(2, WIDTH))
    with again:
        assert not torch.equal(before, made(torch.ones(2, WIDTH)))
