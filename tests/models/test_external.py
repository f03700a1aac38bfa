"""model=external: anybody's module, by its dotted name."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.core.rig import Part
from lowvram.core.step import step
from lowvram.core.structure import Blocks
from lowvram.data.imagefolder import ImageFolder
from lowvram.data.python_source import PythonSource
from lowvram.data.source import ResolvedImageSource, resolve_source
from lowvram.data.spec import DataSpec, Modality
from lowvram.models.external import ExternalConfig
from lowvram.tasks import Auto
from tests.calls import ROOT
from tests.laboratory import CPU, IMAGES, knobs_of, make_batch

WORDS = DataSpec(Modality.TOKENS, 11, (8,))


class Speaker(nn.Module):
    """A user's language model; `drop` is drawn from a number, as some libraries do."""

    def __init__(self, vocab_size: int, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.shares = [share.item() for share in torch.linspace(0, 0.5, depth)]
        self.embedding = nn.Embedding(vocab_size, width)
        layer = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.out = nn.Linear(width, vocab_size)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"hidden": tokens, "logits": self.out(self.encoder(self.embedding(tokens)))}


def not_a_model() -> int:
    return 3


def classifier(num_classes: int) -> nn.Module:
    """A function that makes a model, as other libraries have them."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, num_classes))


HERE = __name__


def speaker(**changes: Any) -> ExternalConfig:
    return ExternalConfig(f"{HERE}.Speaker", {"vocab_size": "data.vocab_size"}, **changes)


def test_a_users_model_trains_with_knobs() -> None:
    task = Auto().pose(speaker(), WORDS)
    rig = assemble(task, knobs_of(ckpt="every1", logits="chunked", accum="x2"), CPU)
    assert [type(block).__name__ for block in task.structure(rig.model).blocks] == ["TransformerEncoderLayer"] * 3
    before = {name: value.clone() for name, value in rig.model.state_dict().items()}
    loss, update = step(rig, make_batch(WORDS, 4))
    assert loss.isfinite()
    assert update.applied
    assert any(not torch.equal(before[name], value) for name, value in rig.model.state_dict().items())


def test_its_values_are_those_that_its_author_gives_it_and_ties_stay() -> None:
    model: Any = assemble(Auto().pose(speaker(), WORDS), knobs_of(), CPU, seed=3).model
    torch.manual_seed(3)
    wanted = Speaker(11)
    assert model.out.weight is model.embedding.weight
    assert all(torch.equal(value, wanted.state_dict()[name]) for name, value in model.state_dict().items())


def test_the_seed_chooses_the_values() -> None:
    first, again, other = (
        assemble(Auto().pose(speaker(), WORDS), knobs_of(), CPU, seed=seed).model.state_dict() for seed in (0, 0, 1)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


class Thrown(Speaker):
    """Draws its first values from every generator but torch's."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        drawn = torch.from_numpy(np.random.randn(*self.out.bias.shape)).float() * random.random()
        self.out.bias = nn.Parameter(drawn)


def test_the_seed_chooses_the_values_whatever_they_are_drawn_from() -> None:
    task = Auto().pose(replace(speaker(), target=f"{HERE}.Thrown"), WORDS)
    biases = []
    for number in range(2):
        np.random.seed(number)
        random.seed(number)
        biases.append(assemble(task, knobs_of(), CPU, seed=3).model.get_parameter("out.bias").tolist())
        assert random.random() == random.Random(number).random()
    assert biases[0] == biases[1]
    assert assemble(task, knobs_of(), CPU, seed=4).model.get_parameter("out.bias").tolist() != biases[0]


def test_a_function_makes_a_model_too_and_takes_the_datas_classes() -> None:
    config = ExternalConfig(f"{HERE}.classifier", {"num_classes": "data.num_classes"})
    rig = assemble(Auto().pose(config, IMAGES), knobs_of(), CPU)
    assert rig.forward(make_batch(IMAGES, 2)).shape == (2, IMAGES.num_classes)


def test_tensors_by_name_become_keywords() -> None:
    class Named(nn.Module):
        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return left - right

    part = Part({"right": torch.ones(2), "left": torch.zeros(2)}, torch.zeros(2))
    assert speaker().call(Named(), part.inputs).tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing", "model.target='nothing': must be the dotted name of a class or function"),
        ("no_such_module.Model", "there is no module no_such_module"),
        (f"{HERE}.Speeker", f"{HERE} has no Speeker"),
        (f"{HERE}.WORDS", "WORDS is a DataSpec"),
        (f"{HERE}.not_a_model", "makes an nn.Module: this made a int"),
    ],
)
def test_a_target_that_makes_no_model_is_reported(target: str, message: str) -> None:
    with pytest.raises(BadInput) as told:
        ExternalConfig(target).make(WORDS)
    assert message in str(told.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "model.args={}: must be what"),
        ({"vocab_size": 11, "wide": 3}, "an unexpected keyword argument 'wide'"),
        ({"vocab_size": "data.size"}, "model.args.vocab_size='data.size': must be a value, or one of data.num_classes"),
    ],
)
def test_arguments_that_do_not_fit_are_reported(args: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as told:
        ExternalConfig(f"{HERE}.Speaker", args).make(WORDS)
    assert message in str(told.value)


def test_what_it_reads_follows_the_data_and_so_does_their_size() -> None:
    config = ExternalConfig("torch.nn.Identity", image_size=48, sequence_length=24)
    images = resolve_source(ImageFolder(path=str(ROOT)), config)
    assert isinstance(images, ResolvedImageSource)
    assert images.source == ImageFolder(path=str(ROOT), image_size=48)
    texts = resolve_source(PythonSource(), config)
    assert isinstance(texts, PythonSource)
    assert texts.sequence_length == 24


def test_blocks_of_no_class_are_reported_with_what_there_is() -> None:
    task = Auto().pose(speaker(blocks="Layer"), WORDS)
    with pytest.raises(BadInput, match=r"model.blocks='Layer': must be .*TransformerEncoderLayer \(3\)"):
        task.structure(task.make_model()).get(Blocks())
