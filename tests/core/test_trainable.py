"""Models that can't be trained, or not as they are: one sentence, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowvram
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.mesh import tell_once
from lowvram.core.rig import Part
from lowvram.core.step import step
from lowvram.data.external import layout_of
from lowvram.data.spec import DataSpec, Modality
from lowvram.models.external import ExternalConfig
from lowvram.tasks import Auto, UserProblem
from tests.laboratory import CPU, IMAGES, knobs_of, make_batch
from tests.models.test_external import WORDS


def words(vocab_size: int = 11, **options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(vocab_size, 8, **options), nn.Linear(8, 8), nn.Linear(8, vocab_size))


def sparse(vocab_size: int) -> nn.Module:
    return words(vocab_size, sparse=True)


def lazy(vocab_size: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(vocab_size, 8), nn.LazyLinear(8), nn.Linear(8, vocab_size))


def frozen(vocab_size: int) -> nn.Module:
    return words(vocab_size).requires_grad_(False)


def scripted(vocab_size: int) -> nn.Module:
    model = words(vocab_size)
    model[1] = torch.jit.script(nn.Linear(8, 8))
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (sparse, r"^0 \(Embedding\) makes sparse gradients"),
        (lazy, r"^1 \(LazyLinear\) has no shapes before its first input"),
        (frozen, r"^no weight of the model trains: requires_grad is false for all of its 5 parameters"),
        (scripted, r"^1 \(RecursiveScriptModule\) is compiled by TorchScript"),
    ],
)
def test_a_model_that_cannot_be_trained_is_named(make: Any, told: str) -> None:
    external = Auto().pose(ExternalConfig(f"{__name__}.{make.__name__}", {"vocab_size": 11}), WORDS)
    for task in (external, lowvram.task(make(11), make_batch(WORDS, 2).inputs)):
        with pytest.raises(Incompatible, match=told):
            assemble(task, knobs_of(), CPU)


def test_weights_in_fp16_that_train_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tell_once.cache_clear()
    lowvram.assemble(lowvram.task(words().half(), make_batch(WORDS, 2).inputs), device="cpu")
    assert "5 of the weights that train are in fp16, such as 0.weight" in capsys.readouterr().out


# What the model is called with, and what it returns


class LastPosition(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.inner = words(vocab_size)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)[:, [-1]], None


class WithTargets(LastPosition):
    def forward(self, x: Tensor, targets: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.inner(x), targets


class Broken(LastPosition):
    def forward(self, x: Tensor) -> Any:
        return len(3)  # pyright: ignore[reportArgumentType]


class Force(nn.Module):
    """Its outputs are a derivative."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed, self.energy = nn.Embedding(vocab_size, vocab_size), nn.Linear(vocab_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x).detach().requires_grad_()
        (force,) = torch.autograd.grad(torch.tanh(self.energy(hidden)).sum(), hidden, create_graph=True)
        return force


@pytest.mark.parametrize(
    ("kind", "error", "told"),
    [
        (LastPosition, BadInput, r"logits have a row for each target: they are \(4, 1, 11\), and the targets \(4, 8\)"),
        (WithTargets, BadInput, r"takes the inputs alone \(one positional argument\).*missing .* 'targets'"),
        (Broken, TypeError, "object of type 'int' has no len"),
    ],
)
def test_how_a_model_is_called_is_told(kind: Any, error: Any, told: str) -> None:
    task = Auto().pose(ExternalConfig(f"{__name__}.{kind.__name__}", {"vocab_size": 11}), WORDS)
    with pytest.raises(error, match=told):
        step(assemble(task, knobs_of(), CPU), make_batch(WORDS, 4))


def test_a_model_that_computes_gradients_is_evaluated() -> None:
    task, batch = Auto().pose(ExternalConfig(f"{__name__}.Force", {"vocab_size": 11}), WORDS), make_batch(WORDS, 4)
    rig = assemble(task, knobs_of(), CPU)
    step(rig, batch)
    with torch.no_grad():
        outputs = rig.forward(Part(batch.inputs, batch.targets))
    assert not outputs.requires_grad
    assert rig.criterion(outputs, batch).isfinite()


class Pixels(nn.Module):
    """Reads images as they are."""

    def __init__(self, first: str) -> None:
        super().__init__()
        firsts = {"conv": nn.Conv2d(3, 3, 3, padding=1), "norm": nn.LayerNorm(8), "batch": nn.BatchNorm2d(3)}
        self.first = firsts.get(first, nn.Identity())
        self.how, self.blocks = first, nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
        self.head = nn.Linear(192, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "inplace":
            x -= 0.5
        elif self.how == "mean":
            x = x - x.mean()
        elif self.how == "own":
            x = x.float() / 255
        return self.head(self.blocks(self.first(x)).flatten(1))


@pytest.mark.parametrize("number_format", ["uint8", "int64"])
def test_images_of_whole_numbers_are_told_where_a_model_cannot_take_them(number_format: str) -> None:
    """Whichever layer fails on them; a model that makes them floats itself trains, and sees them as they are."""
    images = make_batch(IMAGES, 4)
    inputs, targets = (100 * images.inputs.abs()).to(getattr(torch, number_format)), torch.tensor([0, 1, 1, 0])
    spec = DataSpec(Modality.OTHER, 2, (3, 8, 8), layout=layout_of(inputs[0], targets[0]))
    for first in ("conv", "norm", "batch", "inplace", "mean", "linear", "own"):
        model = ExternalConfig(f"{__name__}.Pixels", {"first": first}, blocks="Linear")
        problem = UserProblem(model, spec, nn.CrossEntropyLoss(), "torch.nn.CrossEntropyLoss")
        if first == "own":
            step(assemble(problem, knobs_of(), CPU), Part(inputs, targets))
            continue
        for options in ({}, {"ckpt": "every1"}):
            with pytest.raises(BadInput, match=rf"^data='{number_format} \(.*'.* floats .*image.float\(\) / 255"):
                step(assemble(problem, knobs_of(**options), CPU), Part(inputs, targets))
