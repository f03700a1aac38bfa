"""What a model of lowvram's own has to bring, and that nothing more is asked of one that nobody has heard of."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lowvram.config import registry
from lowvram.config.defaults import CONF
from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.core.step import step
from lowvram.data.packed import Packed
from lowvram.data.source import Data
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.adapter import NoAdapter
from lowvram.loops.export.folder import export, load
from lowvram.loops.export.plain import Origin
from lowvram.models import builtin
from lowvram.models.builtin import OwnModel, OwnModule
from lowvram.tasks import Auto
from tests.laboratory import CPU, TOKENS, documents, knobs_of, make_batch

READ_ONCE = (registry.options_of, registry.ready_options, registry.all_options, registry.knob_of)


@dataclass(frozen=True)
class BagConfig(OwnModel):
    """The least that a configuration has. It tells nothing of dropout or of packed sequences."""

    width: int = 4

    @property
    def modality(self) -> Modality:
        return Modality.TOKENS

    def natural_shape(self) -> tuple[int, ...]:
        return (8,)

    def make(self, spec: DataSpec) -> Bag:
        spec.check_modality(self.modality)
        return Bag(self.width, spec.num_classes)


class Bag(OwnModule):
    """Each token by itself."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(num_classes, width), nn.ModuleList()
        self.head = nn.Linear(width, num_classes)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        return self.head(self.embedding(tokens_bt))

    @torch.no_grad()
    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(generator=generator)


@pytest.fixture
def option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its class in a module of lowvram, its YAML in conf/model."""
    monkeypatch.setattr(BagConfig, "__module__", builtin.__name__)
    monkeypatch.setattr(builtin, "BagConfig", BagConfig, raising=False)
    conf = Path(shutil.copytree(CONF, tmp_path / "conf"))
    (conf / "model" / "bag.yaml").write_text(f"_target_: {builtin.__name__}.BagConfig\nwidth: 4\n")
    monkeypatch.setattr(registry, "CONF", conf)
    for read in READ_ONCE:
        read.cache_clear()
    yield
    for read in READ_ONCE:
        read.cache_clear()


def test_it_trains() -> None:
    rig = assemble(Auto().pose(BagConfig(), TOKENS), knobs_of(optimizer="sgd"), CPU)
    first, *_, last = [step(rig, make_batch(TOKENS, 8))[0] for _ in range(10)]
    assert last < first


@pytest.mark.usefixtures("option")
def test_what_it_has_learnt_can_be_loaded(tmp_path: Path) -> None:
    model = assemble(Auto().pose(BagConfig(), TOKENS), {}, CPU).model
    export(tmp_path / "model", model, Origin(BagConfig(), TOKENS, NoAdapter(), 0), merge=True)
    loaded = load(tmp_path / "model")
    assert isinstance(loaded, Bag)
    assert torch.equal(loaded.head.weight, model.get_parameter("head.weight"))


def test_packed_sequences_are_refused_unless_it_says_that_it_keeps_them_apart() -> None:
    texts = documents([3, 4], TOKENS)
    with pytest.raises(BadInput, match=r"^loader='packed': must be bucketed: this model doesn't keep the sequences"):
        Packed().fit(Data(TOKENS, texts, texts, ""), BagConfig())


def test_data_of_another_kind_are_refused() -> None:
    with pytest.raises(BadInput, match=r"^data='images': must be a source of tokens for this model"):
        BagConfig().make(DataSpec(Modality.IMAGES, 5, (3, 8, 8)))


@pytest.mark.parametrize(("base", "method"), [(OwnModel, "natural_shape"), (OwnModule, "initialise")])
def test_what_is_missing_is_named(base: type, method: str) -> None:
    known = {name: lambda *_: None for name in base.__abstractmethods__ - {method}}
    with pytest.raises(TypeError, match=method):
        type("Unfinished", (base,), known)()
