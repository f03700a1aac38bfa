"""tile over blocks as other people write them: the same as a plain loop, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowvram
from lowvram.config.errors import Incompatible
from lowvram.core.generators import seed_all
from tests.laboratory import relative_error
from tests.restless import CLASSES, WIDTH, Mlp, Net

SIZE, STEPS = 4, 3
SGD = "optimizer=sgd optimizer.lr=0.05 optimizer.momentum=0.9"
KNOBS = ["tile=blocks", "tile=blocks tile.samples=3", "tile=blocks ckpt=every1", "tile=blocks stepping=in_backward"]
pytestmark = pytest.mark.usefixtures("in_double")


def batches(size: int = SIZE) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, WIDTH, generator=draw), torch.randint(CLASSES, (size,), generator=draw))
        for _ in range(STEPS)
    ]


def plain(make: Callable[[], nn.Module]) -> nn.Module:
    seed_all(0)
    model = make().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def trained(make: Callable[[], nn.Module], words: str) -> nn.Module:
    seed_all(0)
    rig = lowvram.assemble(lowvram.task(make().train(), batches()[0][0]), f"{SGD} {words}", device="cpu")
    for x, y in batches():
        lowvram.step(rig, lowvram.Part(x, y))
    return rig.model


def assert_same(make: Callable[[], nn.Module], knobs: Sequence[str] = KNOBS) -> None:
    wanted = dict(plain(make).named_parameters())
    for words in knobs:
        assert relative_error(dict(trained(make, words).named_parameters()), wanted) < 1e-12, words


class FreezesAroundBlocks(Net):
    """Every second block learns nothing in the step, though its weights train as the model stands."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            block.requires_grad_(number % 2 == 0)
            x = block(x)
            block.requires_grad_(True)
        return self.head(x)


class Adversarial(Net):
    """The blocks judge twice: frozen for the stem, and then for themselves."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.stem(x)
        self.blocks.requires_grad_(False)
        judged = self.judge(first)
        self.blocks.requires_grad_(True)
        return self.head(judged) + self.head(self.judge(first.detach() + x))

    def judge(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_weights_that_a_call_leaves_frozen_get_no_gradient_from_it() -> None:
    assert_same(lambda: FreezesAroundBlocks(Mlp))
    assert_same(lambda: Adversarial(Mlp), KNOBS[:3])
    with pytest.raises(
        Incompatible, match=r"a\.weight of Mlp was changed .*: choose stepping=after_backward or tile=none"
    ):
        trained(lambda: Adversarial(Mlp), KNOBS[3])


class AsksForGraph(Mlp):
    def between(self, x: Tensor) -> Tensor:
        return x * 2 if torch.is_grad_enabled() and x.requires_grad else x


class Descends(Mlp):
    """A step down an energy's gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.requires_grad_()
            energy = self.b(torch.tanh(self.a(x))).square().sum()
            (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
        return x - 0.1 * gradient


def test_the_first_pass_has_a_graph_as_without_tiles() -> None:
    for block in (AsksForGraph, Descends):
        assert_same(lambda block=block: Net(block))
        seed_all(0)
        model = Net(block)
        x = batches(7)[0][0]
        with torch.no_grad():
            wanted = model(x)
        lowvram.assemble(lowvram.task(model, x), "tile=blocks", device="cpu")
        with torch.no_grad():
            torch.testing.assert_close(model(x), wanted)
