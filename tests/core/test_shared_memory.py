"""Tensors that share memory without being one, and copies of models of any code."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowvram
from lowvram.config.errors import Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.knob import Knob, Stage
from lowvram.core.model_copies import copied
from lowvram.core.rig import Part, Rig
from lowvram.core.shared_memory import names_sharing, overlaps
from lowvram.core.step import step
from lowvram.data.spec import DataSpec, Modality
from lowvram.models import layout
from lowvram.models.external import ExternalConfig
from lowvram.tasks import Auto
from tests.laboratory import CPU, knobs_of, make_batch

SGD = "optimizer=sgd optimizer.lr=0.1 optimizer.momentum=0 optimizer.weight_decay=0"
WORDS = DataSpec(Modality.TOKENS, 11, (8,))


class Tied(nn.Module):
    """One weight is the transpose of the other, and in the same memory."""

    def __init__(self, vocab_size: int = 11) -> None:
        super().__init__()
        self.embed, self.enc, self.dec = nn.Embedding(vocab_size, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, vocab_size)
        self.tie()

    def tie(self) -> None:
        self.dec.weight.data = self.enc.weight.data.t()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enc(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.dec(x))


class Sliced(Tied):
    def tie(self) -> None:
        self.head.weight.data = self.embed.weight.data
        self.dec.bias.data = self.enc.weight.data[3]


class Apart(Tied):
    """In one memory, which they don't share: as the weights of an LSTM on a card."""

    def tie(self) -> None:
        both = torch.cat([self.enc.weight.data, self.dec.weight.data])
        self.enc.weight.data, self.dec.weight.data = both[:8], both[8:]


def test_names_are_those_that_have_a_number_in_common() -> None:
    assert names_sharing(Tied()) == [["dec.weight", "enc.weight"]] or names_sharing(Tied()) == [
        ["enc.weight", "dec.weight"]
    ]
    assert sorted(map(sorted, names_sharing(Sliced()))) == [["dec.bias", "enc.weight"], ["embed.weight", "head.weight"]]
    assert names_sharing(Apart()) == []
    assert names_sharing(copied(Tied(), "meta")) == names_sharing(Tied())


def bytes_of(tensor: Tensor) -> set[int]:
    places = torch.arange(tensor.untyped_storage().nbytes() // tensor.itemsize)
    numbers = places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten().tolist()
    return {number * tensor.itemsize + byte for number in numbers for byte in range(tensor.itemsize)}


def test_overlaps_are_those_that_a_list_of_all_bytes_shows() -> None:
    draw = random.Random(20261127)
    num_overlapping = 0
    for _ in range(300):
        memory, group = torch.zeros(60), list[Tensor]()
        while len(group) < 4:
            typed = memory.view(draw.choice([torch.float32, torch.bfloat16, torch.complex64]))
            shape = [draw.randint(1, 4) for _ in range(draw.randint(0, 3))]
            strides, offset = [draw.randint(0, 8) for _ in shape], draw.randrange(len(typed))
            last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            if last < len(typed):
                group.append(typed.as_strided(shape, strides, offset))
        wanted = [one for one in group if any(bytes_of(one) & bytes_of(each) for each in group if each is not one)]
        assert list(map(id, overlaps(group))) == list(map(id, wanted)), [
            (each.dtype, each.shape, each.stride(), each.storage_offset()) for each in group
        ]
        num_overlapping += len(wanted)
    assert 100 < num_overlapping < 1100


def test_overlaps_of_weights_of_any_size_are_found_without_listing_their_numbers() -> None:
    """This memory has 4 TB: one byte for each number would be too much."""
    memory = torch.empty(2**20, 2**20, device="meta")
    rows = [memory[2**8 * number : 2**8 * (number + 1)] for number in range(2**12)]  # as an LSTM's weights on a card
    assert len(overlaps([memory, memory.detach()])) == 2  # decoder.weight.data = encoder.weight.data
    assert overlaps(rows) == []
    assert len(overlaps([memory, memory.t(), memory[5:], *rows])) == 3 + len(rows)
    assert len(overlaps([memory[:, ::2], memory[:, ::2].detach()])) == 2


def trained_by_a_plain_loop(kind: Any, batch: Part) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = kind()
    for _ in range(2):
        model.zero_grad()
        F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten(), ignore_index=-100).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
    return model.state_dict()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [Tied, Sliced, Apart])
@pytest.mark.parametrize("way", ["cli", "api"])
def test_the_tie_is_kept_or_refused(kind: Any, way: str) -> None:
    batch = make_batch(WORDS, 4)
    wanted = trained_by_a_plain_loop(kind, batch)
    for knob in ("", "ckpt=every1", "ckpt=sqrt", "offload=activations", *REFUSED):
        torch.manual_seed(0)
        own = lowvram.task(kind(), batch.inputs)
        task = own if way == "api" else Auto().pose(ExternalConfig(f"{__name__}.{kind.__name__}"), WORDS)
        if knob in REFUSED and kind is not Apart:
            with pytest.raises(Incompatible, match=r"share memory: .* make them one parameter"):
                lowvram.assemble(task, f"{SGD} {knob}", device="cpu")
            continue
        rig = lowvram.assemble(task, f"{SGD} {knob}", device="cpu")
        for _ in range(2):
            step(rig, batch)
        for name, value in rig.model.state_dict().items():
            found = value.full_tensor() if hasattr(value, "full_tensor") else value
            torch.testing.assert_close(found, wanted[name], rtol=1e-5, atol=1e-7)


REFUSED = ("stepping=in_backward", "stepping=cpu_offload", "offload=parameters")


class Masked(Apart):
    """Two constant buffers, of which one is a part of the other."""

    def tie(self) -> None:
        mask = torch.ones(8, 8).tril()
        self.register_buffer("mask", mask)
        self.register_buffer("short", mask[:, :4])


class Frozen(Tied):
    def tie(self) -> None:
        super().tie()
        self.enc.requires_grad_(False)
        self.dec.requires_grad_(False)


class HalfFrozen(Tied):
    def tie(self) -> None:
        super().tie()
        self.enc.requires_grad_(False)


class ReachedError(Exception):
    """The checks before the weights have memory have passed."""


@dataclass(frozen=True)
class Stops(Knob):
    stage = Stage.CHECKPOINT

    def apply(self, rig: Rig) -> Rig:
        raise ReachedError


def test_a_card_takes_shared_memory_in_which_nothing_trains() -> None:
    def check(kind: type[nn.Module], **options: str) -> None:
        task = Auto().pose(ExternalConfig(f"{__name__}.{kind.__name__}"), WORDS)
        assemble(task, {**knobs_of(**options), "stops": Stops()}, torch.device("cuda"), absent={})

    for kind, options in ((Masked, {}), (Frozen, {}), (Tied, {"adapter": "lora"}), (Apart, {})):
        with pytest.raises(ReachedError):
            check(kind, **options)
    for kind in (Tied, Sliced, HalfFrozen):
        with pytest.raises(Incompatible, match=r"share memory .* a card updates many weights at once"):
            check(kind)


@dataclass(frozen=True)
class Parts(Knob):
    """Gives a layer a weight of its own."""

    stage = Stage.BUILD

    def apply(self, rig: Rig) -> Rig:
        layer = rig.model.get_submodule("dec")
        layer.weight = nn.Parameter(layer.get_parameter("weight").detach().clone())
        return rig


def test_a_tie_that_would_be_lost_is_refused() -> None:
    task = Auto().pose(ExternalConfig(f"{__name__}.Tied"), WORDS)
    with pytest.raises(Incompatible, match=r"dec.weight and enc.weight share memory .* they would come apart"):
        assemble(task, {**knobs_of(), "qat": Parts()}, CPU)


def test_rounded_weights_keep_their_tie() -> None:
    task = Auto().pose(ExternalConfig(f"{__name__}.Tied"), WORDS)
    rig = assemble(task, knobs_of(qat="int8"), CPU)
    step(rig, make_batch(WORDS, 4))
    assert names_sharing(rig.model) == [["dec.weight", "enc.weight"]]


@pytest.mark.parametrize("kind", [Tied, Sliced, Apart])
def test_what_shares_memory_is_saved_and_loaded(kind: Any, tmp_path: Path) -> None:
    config = ExternalConfig(f"{__name__}.{kind.__name__}")
    saved, loaded = config.build(WORDS), config.build(WORDS)
    config.save(saved, WORDS, tmp_path)
    layout.load(loaded, tmp_path / layout.WEIGHTS)
    assert names_sharing(loaded) == names_sharing(saved)
    assert all(torch.equal(saved.state_dict()[name], each) for name, each in loaded.state_dict().items())


# Copies


class Normed(nn.Module):
    """Weights that others compute, before or in the forward pass."""

    def __init__(self, vocab_size: int = 11) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)
        self.blocks = nn.ModuleList(
            nn.Sequential(old(), new(), pruned(), spectral(), nn.Linear(8, 8)) for _ in range(2)
        )
        self.constant = torch.tensor(2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * self.constant
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def old() -> nn.Module:
    return nn.utils.weight_norm(nn.Linear(8, 8))


def new() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))


def pruned() -> nn.Module:
    from torch.nn.utils import prune

    return prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.3)


def spectral() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(8, 8))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_models_whose_weights_are_computed_train_with_knobs() -> None:
    """Those of the user's own, too: their blocks are found."""
    for knob in (
        "",
        "ckpt=every1",
        "qat=int8",
        "sparsity=magnitude sparsity.steps=3",
        "adapter=lora",
        "optimizer=muon",
    ):
        torch.manual_seed(0)
        batch = make_batch(WORDS, 4)
        for task in (
            Auto().pose(ExternalConfig(f"{__name__}.Normed"), WORDS),
            lowvram.task(Normed(), batch.inputs),
        ):
            assert len(task.structure(task.make_model()).blocks) == 2
            rig = lowvram.assemble(task, knob, device="cpu")
            assert step(rig, batch)[0].isfinite()
