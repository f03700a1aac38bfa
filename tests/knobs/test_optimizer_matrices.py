"""Which parameters optimizers of matrices update by their own rule, and which as AdamW does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lowvram.core.assemble import assemble
from lowvram.core.step import step
from lowvram.knobs.optimizer import Apollo, Muon
from lowvram.knobs.optimizer.matrices import MatrixKnob, roles_of
from tests.laboratory import CPU, PROBLEMS, batches, knobs_of

OF_MATRICES = ["apollo", "apollo_mini", "galore", "muon", "sinkgd"]


def matrices_of(model: nn.Module, head: nn.Linear | None, knob: type[MatrixKnob] = Apollo) -> set[str]:
    roles = roles_of(model, () if head is None else {head.weight}, knob.layers)
    return {name for name, parameter in model.named_parameters() if roles[parameter].is_matrix}


def test_matrices_of_a_resnet_are_those_of_its_convolutions() -> None:
    rig = assemble(PROBLEMS["resnet"], knobs_of(optimizer="apollo"), CPU)
    convolutions = {f"{name}.weight" for name, module in rig.model.named_modules() if isinstance(module, nn.Conv2d)}
    assert matrices_of(rig.model, rig.structure.head) >= convolutions
    assert all(name.endswith(".weight") for name in matrices_of(rig.model, None))


def test_shared_weights_and_the_head_are_none() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "tied": nn.Linear(4, 5), "hidden": nn.Linear(4, 4)})
    model["head"] = head = nn.Linear(4, 5)
    model["tied"].weight = model["embedding"].weight
    assert matrices_of(model, head) == {"hidden.weight"}


@pytest.mark.parametrize("knob", [Apollo, Muon])
def test_transposed_linear_layers_are_linear_layers(knob: type[MatrixKnob]) -> None:
    """Those of GPT-2 in transformers. AdamW took their weights for convolutions'."""
    assert matrices_of(nn.Sequential(Conv1D(6, 4), nn.LayerNorm(6)), None, knob) == {"0.weight"}


def test_numbers_are_places_in_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    assert [roles_of(model, (), ())[parameter].number for parameter in model.parameters()] == [0, 1, 2, 3]


@pytest.mark.sampled
@pytest.mark.parametrize("stepping", ["in_backward", "cpu_offload"])
@pytest.mark.parametrize("option", [*OF_MATRICES, "adam_mini"])
def test_where_and_when_a_parameter_is_updated_changes_nothing(option: str, stepping: str) -> None:
    """Random projections are those of the parameter, not of the optimizer that holds it."""
    rigs = [
        assemble(PROBLEMS["transformer"], knobs_of(optimizer=option, stepping=each), CPU)
        for each in ("after_backward", stepping)
    ]
    for batch in batches(PROBLEMS["transformer"].spec, [4, 4, 4]):
        for rig in rigs:
            assert step(rig, batch)[1].applied
    for found, wanted in zip(*(rig.model.parameters() for rig in rigs), strict=True):
        assert torch.equal(found, wanted)
