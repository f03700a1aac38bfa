"""Parts, the assembly of a rig, and the birth of its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.config.errors import Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.device import absent_facts
from lowvram.core.fact import Fact
from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import IGNORE, Part, Rig
from lowvram.core.seeds import generator_for
from lowvram.models.resnet import ResNetConfig
from lowvram.models.transformer import TransformerConfig
from lowvram.tasks import Auto
from tests.laboratory import CPU, IMAGES, PROBLEMS, RESNET, TOKENS, TRANSFORMER, InDouble, needs_gpu


def initial(model: TransformerConfig | ResNetConfig, seed: int = 0) -> dict[str, Tensor]:
    spec = TOKENS if isinstance(model, TransformerConfig) else IMAGES
    return assemble(Auto().pose(model, spec), {}, CPU, seed).model.state_dict()


# Parts


def test_a_part_counts_samples_and_targets() -> None:
    part = Part({"a": torch.zeros(3, 2), "b": torch.ones(3)}, torch.tensor([[1, IGNORE], [0, 2], [IGNORE, IGNORE]]))
    assert part.num_samples == 3
    assert part.num_targets.item() == 3
    assert len(part.tensors()) == 3


def test_a_part_moves_as_a_whole() -> None:
    part = Part({"a": torch.zeros(3), "b": [torch.ones(3)]}, torch.zeros(3))
    moved = part.to(torch.device("meta"))
    assert all(tensor.is_meta for tensor in moved.tensors())
    assert not any(tensor.is_meta for tensor in part.tensors())


# Assembly


@dataclass(frozen=True)
class Noting(Knob):
    """Writes down when it acts, and on what."""

    notes: list[tuple[Stage, bool]]
    fact: Fact | None = None

    def needs(self) -> frozenset[Fact]:
        return frozenset({self.fact} if self.fact else ())

    def apply(self, rig: Rig) -> Rig:
        self.notes.append((self.stage, all(tensor.is_meta for tensor in rig.model.parameters())))
        return rig


def noting(its_stage: Stage, notes: list[tuple[Stage, bool]], fact: Fact | None = None) -> Knob:
    return type(f"Noting{its_stage.name}", (Noting,), {"stage": its_stage})(notes, fact)


def test_knobs_act_in_the_order_of_stages_and_weights_come_after_shard() -> None:
    notes: list[tuple[Stage, bool]] = []
    assemble(PROBLEMS["resnet"], {stage.name: noting(stage, notes) for stage in reversed(Stage)}, CPU)
    assert [stage for stage, _ in notes] == list(Stage)
    assert [stage for stage, is_meta in notes if is_meta] == [
        stage for stage in Stage if stage.value <= Stage.SHARD.value
    ]


def test_within_a_stage_the_order_given_counts() -> None:
    notes: list[tuple[Stage, bool]] = []

    class Second(Knob):
        stage = Stage.BATCH

        def apply(self, rig: Rig) -> Rig:
            assert len(notes) == 1
            return rig

    assemble(PROBLEMS["resnet"], {"b": noting(Stage.BATCH, notes), "a": Second()}, CPU)


def test_all_conflicts_come_in_one_message_and_only_process_has_acted() -> None:
    """(The device may have to be set up before it can be asked what it lacks.)"""
    notes: list[tuple[Stage, bool]] = []
    knobs = {stage.name: noting(stage, notes, Fact.MANY_RANKS) for stage in (Stage.PROCESS, Stage.BUILD, Stage.BATCH)}
    with pytest.raises(Incompatible) as refusal:
        assemble(PROBLEMS["resnet"], knobs, CPU)
    assert [stage for stage, _ in notes] == [Stage.PROCESS]
    sentence = f"needs that the point has several ranks: {absent_facts(CPU)[Fact.MANY_RANKS]}"
    assert str(refusal.value) == "; ".join(f"{name} {sentence}" for name in knobs)


# Initial weights: a function of the seed and each tensor's name, nothing else.


def test_the_seed_decides() -> None:
    first, again, other = initial(TRANSFORMER, 1), initial(TRANSFORMER, 1), initial(TRANSFORMER, 2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["token_embedding.weight"], other["token_embedding.weight"])


def test_every_weight_has_randomness_of_its_own() -> None:
    weights = initial(TRANSFORMER)
    names = [name for name in weights if name.endswith("qkv.weight")]
    assert len({weights[name].sum().item() for name in names}) == len(names) == 3


@pytest.mark.parametrize(
    ("small", "large"),
    [
        (TRANSFORMER, replace(TRANSFORMER, num_layers=5)),
        (RESNET, replace(RESNET, layers=[3, 2])),
        (RESNET, replace(RESNET, channels_last=True)),
    ],
)
def test_other_tensors_change_nothing(
    small: TransformerConfig | ResNetConfig, large: TransformerConfig | ResNetConfig
) -> None:
    few, many = initial(small), initial(large)
    scaled = {name for name in few if name.endswith(("merge.weight", "down.weight"))}  # by the number of layers
    common = few.keys() & many.keys() - scaled
    if small is RESNET and large != replace(RESNET, channels_last=True):
        common = {name for name in common if not name.startswith("blocks.2")}  # there it is another block
    assert len(common) > 5
    assert all(torch.equal(few[name], many[name]) for name in common)


def test_nothing_else_that_is_random_is_touched() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    initial(TRANSFORMER)
    assert torch.equal(torch.rand(1), expected)


def test_a_generator_belongs_to_seed_and_name() -> None:
    def draw(seed: int, name: str) -> float:
        return torch.rand(1, generator=generator_for(seed, name, CPU)).item()

    assert draw(0, "a") == draw(0, "a")
    assert len({draw(0, "a"), draw(0, "b"), draw(1, "a"), draw(2**62, "a")}) == 4


def test_tied_weights_stay_tied_and_are_one_parameter() -> None:
    model: Any = assemble(PROBLEMS["transformer"], {}, CPU).model
    assert model.head.weight is model.token_embedding.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_strides_of_channels_last_stay() -> None:
    model = assemble(PROBLEMS["resnet_frozen"], {}, CPU).model
    wide = [p for p in model.parameters() if p.ndim == 4 and p.shape[1] > 1 and p.shape[2] > 1]
    assert wide
    assert all(p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous() for p in wide)


def test_what_is_trained_and_what_is_not_stays_so() -> None:
    class HalfFrozen(InDouble):
        def make_model(self) -> nn.Module:
            model = super().make_model()
            next(model.parameters()).requires_grad_(False)
            return model

    rig = assemble(HalfFrozen(PROBLEMS["resnet"]), {}, CPU)
    all_parameters = list(rig.model.parameters())
    assert not all_parameters[0].requires_grad
    assert rig.trainable == all_parameters[1:]
    assert all(isinstance(parameter, nn.Parameter) for parameter in all_parameters)


class BuiltForReal(InDouble):
    """A model with weights of its own, such as one that was loaded."""

    def make_model(self) -> nn.Module:
        with torch.device("cpu"):
            model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, 7.0)
        return model

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return []

    def head(self, model: nn.Module) -> None:
        return None

    def tail(self, model: nn.Module) -> None:
        return None


def test_a_model_that_was_built_for_real_is_left_alone() -> None:
    model: Any = assemble(BuiltForReal(PROBLEMS["transformer"]), {}, CPU).model
    assert torch.equal(model.weight, torch.full((2, 2), 7.0))


@pytest.mark.gpu
@needs_gpu[1]
def test_a_model_that_was_built_for_real_moves_to_the_device() -> None:
    model: Any = assemble(BuiltForReal(PROBLEMS["transformer"]), {}, torch.device("cuda")).model
    assert model.weight.is_cuda
    assert torch.equal(model.weight.cpu(), torch.full((2, 2), 7.0))
