"""stepping=in_backward on models whose gradients come in pieces, or whose weights are read after their gradients: the
same as a plain loop, or a refusal in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowvram
from lowvram.config.errors import Incompatible
from lowvram.core.generators import seed_all
from tests.laboratory import relative_error
from tests.restless import CLASSES, WIDTH, Mlp, Net

SIZE, STEPS, CLIP = 4, 3, 0.7
SGD = "optimizer=sgd optimizer.lr=0.05 optimizer.momentum=0.9"
AT_ONCE = "stepping=in_backward"
TWO_PASSES = f"{AT_ONCE} stepping.clip={CLIP} stepping.norm=two_passes"
SUMMED = [f"{AT_ONCE} stepping.clip={CLIP}", f"stepping=cpu_offload stepping.clip={CLIP}"]


class OneBlock(nn.Module):
    """Calls its block three times, each time through `call`."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(WIDTH, WIDTH), Mlp(), nn.Linear(WIDTH, CLASSES)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            x = self.call(self.block, x)
        return self.head(x)


class Reversible(torch.autograd.Function):
    """Computes a block again in its own backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.block(x), gradient)
        return x.grad, None


def reentrant(block: nn.Module, x: Tensor) -> Tensor:
    output = checkpoint(block, x, use_reentrant=True)
    assert isinstance(output, Tensor)
    return output


def reversible(block: nn.Module, x: Tensor) -> Tensor:
    return Reversible.apply(x, block)  # pyright: ignore[reportReturnType]


class InList(Mlp):
    """Reaches its weights through a list, where tile doesn't see them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.a.weight, self.b.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(torch.tanh(F.linear(x, self.weights[0], self.a.bias)), self.weights[1], self.b.bias)


class OwnBackward(Net):
    """An auxiliary loss with a backward pass of its own, in the forward pass."""

    def __init__(self) -> None:
        super().__init__(Mlp)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        if torch.is_grad_enabled():
            (x.mean(0).square().sum() * 0.1).backward(retain_graph=True)
        return self.head(x)


class OnlyOwnBackward(Net):
    """The stem learns from the auxiliary loss alone; the forward pass goes on with it afterwards."""

    def __init__(self) -> None:
        super().__init__(Mlp)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.stem(x).square().mean().backward()
        x = self.stem(x).detach()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(SIZE, WIDTH, generator=draw), torch.randint(CLASSES, (SIZE,), generator=draw))
        for _ in range(STEPS)
    ]


def plain(make: Callable[[], nn.Module], clip: float | None) -> tuple[nn.Module, list[Tensor]]:
    """A plain loop: the model afterwards, and the norms before clipping."""
    seed_all(0)
    model, norms = make().train(), list[Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), float("inf") if clip is None else clip))
        optimizer.step()
    return model, norms


def trained(make: Callable[[], nn.Module], words: str, optimizer: str = SGD) -> tuple[nn.Module, list[Tensor]]:
    seed_all(0)
    task = lowvram.task(make().train(), batches()[0][0])
    rig = lowvram.assemble(task, f"{optimizer} {words}", device="cpu")
    return rig.model, [lowvram.step(rig, lowvram.Part(x, y))[1].grad_norm for x, y in batches()]


def assert_same(make: Callable[[], nn.Module], words: str) -> None:
    found, norms = trained(make, words)
    wanted, wanted_norms = plain(make, CLIP if "clip" in words else None)
    assert relative_error(dict(found.named_parameters()), dict(wanted.named_parameters())) < 1e-6, words
    torch.testing.assert_close(norms, wanted_norms)


IN_PIECES: list[tuple[Callable[[], nn.Module], str, str]] = [
    (lambda: OneBlock(reentrant), "", "block.b.weight"),
    (lambda: OneBlock(reversible), "", "block.b.weight"),
    (lambda: Net(InList), "tile=blocks ", "blocks.3.b.weight"),
]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_gradients_in_pieces_are_summed_or_refused() -> None:
    for make, words, name in IN_PIECES:
        for stepping in (AT_ONCE, TWO_PASSES):
            with pytest.raises(Incompatible, match=rf"computes that of {name} in several pieces.*: choose stepping="):
                trained(make, words + stepping)
        for stepping in SUMMED:
            assert_same(make, words + stepping)


def test_in_the_last_of_several_parts_they_are_refused_too() -> None:
    with pytest.raises(Incompatible, match=r"in several pieces"):
        trained(lambda: OneBlock(reentrant), f"{AT_ONCE} stepping.sums=bf16 accum=x2")
    with pytest.raises(Incompatible, match=r"in several pieces"):  # from the second step on
        trained(lambda: OneBlock(reentrant), f"{AT_ONCE} stepping.clip=1 stepping.norm=last_step")


def test_the_gradients_of_a_backward_pass_of_the_models_own_wait_for_the_steps() -> None:
    for make in (OwnBackward, OnlyOwnBackward):
        for words in (AT_ONCE, *SUMMED):
            assert_same(make, words)
        with pytest.raises(Incompatible, match=r"a backward\(\) in the forward pass .*: choose stepping\.norm=host"):
            trained(make, TWO_PASSES)


# Weights that are read after their gradients


class Adversarial(nn.Module):
    """Two passes of a discriminator: frozen for the generator, and then for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = Mlp(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Mlp())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        fake = self.generator(x)
        self.discriminator.requires_grad_(False)
        seen = self.discriminator(fake)
        self.discriminator.requires_grad_(True)
        return self.head(seen) + self.head(self.discriminator(fake.detach() + x))


class Detached(nn.Module):
    """An early use of a weight that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x)) @ self.weight.detach()
        return self.head(torch.tanh(torch.tanh(x) @ self.weight))


class ReadsNext(Mlp):
    """Computes with a weight of the next block, too, as it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.next: list[Mlp] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(x @ block.a.weight.detach() for block in self.next)


def chain() -> nn.Module:
    net = Net(ReadsNext)
    for block, following in zip(net.blocks, net.blocks[1:], strict=False):
        assert isinstance(block, ReadsNext)
        block.next = [following]  # pyright: ignore[reportAttributeAccessIssue]
    return net


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw_8bit", "muon"])
def test_a_weight_that_is_read_after_its_update_is_refused(optimizer: str) -> None:
    for make in (Adversarial, Detached, chain):
        for words in (AT_ONCE, TWO_PASSES):
            with pytest.raises(Incompatible, match=r"stepping=in_backward needs that a weight isn't read any more"):
                trained(make, words, f"optimizer={optimizer}")
        assert_same(make, SUMMED[0])
