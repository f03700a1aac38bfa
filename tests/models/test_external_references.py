"""Models whose own code holds weights by other ways than through modules train as in a plain loop."""

from __future__ import annotations

import threading
import weakref
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.core.model_copies import copied
from lowvram.core.rig import Part
from lowvram.core.step import step
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.optimizer import SGD
from lowvram.models.external import ExternalConfig, HandedOver
from lowvram.tasks import Auto
from tests.laboratory import CPU, knobs_of

WIDTH, SIZE = 8, 11
WORDS = DataSpec(Modality.TOKENS, SIZE, (6,))
Pair = namedtuple("Pair", "first second")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Base(nn.Module):
    f: Any
    held: Any

    def __init__(self) -> None:
        super().__init__()
        self.e, self.blocks = nn.Embedding(SIZE, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.scale, self.head = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, SIZE)
        self.begin()

    def begin(self) -> None:
        """What a user's constructor does."""

    def middle(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        h = self.e(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.middle(h))


class Called(Base):
    def middle(self, h: Tensor) -> Tensor:
        return self.f(h)


class Lambda(Called):
    def begin(self) -> None:
        self.f = lambda h: torch.tanh(h) * self.scale


class Default(Called):
    def begin(self) -> None:
        self.f = lambda h, scale=self.scale: torch.tanh(h) * scale


class Keyword(Called):
    def begin(self) -> None:
        def f(h: Tensor, *, scale: Tensor = self.scale) -> Tensor:
            return torch.tanh(h) * scale

        self.f = f


class Partial(Called):
    def begin(self) -> None:
        self.f = partial(torch.mul, self.scale)


class Nested(Called):
    def begin(self) -> None:
        def outer() -> Callable[[Tensor], Tensor]:
            inner = partial(lambda scale, h: h * scale, self.scale)
            return lambda h: inner(h)

        self.f = outer()


class Method(Called):
    def scaled(self, h: Tensor) -> Tensor:
        return h * self.scale

    def begin(self) -> None:
        self.f = self.scaled


class Helper:
    def __init__(self, owner: Any) -> None:
        self.owner, self.calls = owner, 0

    def __call__(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * self.owner.scale


class WithHelper(Called):
    def begin(self) -> None:
        self.f = Helper(self)


class Slotted:
    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


class WithSlots(Base):
    def begin(self) -> None:
        self.held = Slotted(self.scale)

    def middle(self, h: Tensor) -> Tensor:
        return h * self.held.weight


class Patched(Base):
    def begin(self) -> None:
        def halved(old: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda x: old(x) * 0.5

        for block in self.blocks:
            block.forward = halved(block.forward)


class Listed(Base):
    def begin(self) -> None:
        shared = (self.scale, Pair(self.scale, 3.0))
        self.held = [self.scale, {"of": shared, "again": shared}]

    def middle(self, h: Tensor) -> Tensor:
        return h * self.held[0] + self.held[1]["of"][0] * self.held[1]["again"][1].first


class Alias(Base):
    def begin(self) -> None:
        self.held = self.e.weight.detach()

    def middle(self, h: Tensor) -> Tensor:
        return h + 0.1 * self.held[:1]


class AliasedPart(Base):
    def begin(self) -> None:
        self.held = [self.e.weight.data[2:5].t()]

    def middle(self, h: Tensor) -> Tensor:
        return h + 0.1 * self.held[0][:, 1]


def halve(weight: Any) -> None:
    weight.grad.mul_(0.5)


class Gradients(Base):
    def begin(self) -> None:
        weight: Any = self.head.weight
        weight.share = 0.3
        weight.register_hook(lambda gradient: gradient * weight.share)
        self.scale.register_hook(lambda gradient: gradient * self.head.bias.detach().sum().exp())
        self.e.weight.register_post_accumulate_grad_hook(halve)

    def middle(self, h: Tensor) -> Tensor:
        return h * self.scale


class Attribute(Base):
    def begin(self) -> None:
        scale: Any = self.scale
        scale.factor = 0.7

    def middle(self, h: Tensor) -> Tensor:
        scale: Any = self.scale
        return h * scale * scale.factor


class Collecting(Base):
    def begin(self) -> None:
        self.held = []
        for block in self.blocks:
            block.register_forward_hook(lambda block, given, output: self.held.append(output))

    def middle(self, h: Tensor) -> Tensor:
        h = h + 0.3 * torch.stack(self.held).sum(0)
        self.held.clear()
        return h


class Appending(Base):
    def begin(self) -> None:
        kept: list[Any] = []
        self.held = kept
        self.blocks[0].register_forward_hook(lambda block, given, output: kept.append(output))

    def middle(self, h: Tensor) -> Tensor:
        return h + self.held.pop()


class Functions(Base):
    def begin(self) -> None:
        self.held = F

    def middle(self, h: Tensor) -> Tensor:
        return self.held.relu(h) * self.scale


class Weak(Base):
    def begin(self) -> None:
        block: Any = self.blocks[0]
        block.parent = weakref.ref(self)
        block.register_forward_pre_hook(lambda block, given: (given[0] * block.parent().scale,))


class Counting(Called):
    def begin(self) -> None:
        calls = 0

        def f(h: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return h * self.scale / calls

        self.f, self.held = f, lambda: calls


MODELS = (
    *(Lambda, Default, Keyword, Partial, Nested, Method, WithHelper, WithSlots, Patched, Listed, Alias, AliasedPart),
    *(Gradients, Attribute, Collecting, Appending, Functions, Weak, Counting),
)


def batches() -> list[Part]:
    torch.manual_seed(11)
    return [Part(torch.randint(SIZE, (4, 6)), torch.randint(SIZE, (4, 6))) for _ in range(4)]


def plain(kind: Callable[[], nn.Module]) -> tuple[list[float], nn.Module]:
    torch.manual_seed(5)
    model = kind()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2), []
    for part in batches():
        loss = F.cross_entropy(model(part.inputs).flatten(0, 1), part.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def test_every_way_to_hold_a_weight_trains_as_in_a_plain_loop() -> None:
    for kind in MODELS:
        wanted, model = plain(kind)
        task = Auto().pose(ExternalConfig(f"{__name__}.{kind.__name__}"), WORDS)
        rig = assemble(task, knobs_of(optimizer=SGD(lr=0.2, momentum=0.0, weight_decay=0.0)), CPU, seed=5)
        losses = [step(rig, part)[0].item() for part in batches()]
        assert losses == pytest.approx(wanted, rel=1e-5), kind.__name__
        found = rig.model.state_dict()
        for name, value in model.state_dict().items():
            assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-6), (kind.__name__, name)


class Locked(Base):
    def begin(self) -> None:
        self.held = {"lock": threading.Lock()}


class Bound(Called):
    def begin(self) -> None:
        self.kept: list[Tensor] = [self.scale]
        self.f = self.kept.__getitem__


class Proxy(Base):
    def begin(self) -> None:
        self.held = [weakref.proxy(self)]


def test_what_cannot_be_moved_along_is_refused_by_its_name() -> None:
    for kind, named in (
        (Locked, "held can't be copied"),
        (Bound, r"f\[0\] refers to kept"),
        (Proxy, r"held\[0\], a weak proxy"),
    ):
        with pytest.raises(BadInput, match=rf"^model\.target='.*': must be a model that can be copied: {named}"):
            HandedOver(kind.__name__, maker=kind).make(WORDS)


def test_a_copy_shares_no_function_of_its_own_with_the_model() -> None:
    """What a closure holds beside the model, such as a user's log, stays the user's."""
    log: list[Tensor] = []

    class Logging(Called):
        def begin(self) -> None:
            self.f = lambda h: (log.append(h), h)[1]

    model = Logging()
    assert copied(model, "cpu").f is model.f
    lambda_model = Lambda()
    assert copied(lambda_model, "cpu").f is not lambda_model.f
